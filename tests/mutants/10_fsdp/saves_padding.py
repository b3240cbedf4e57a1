"""Saves shards with their padding, which depends on the number of ranks.

caught by: ZeRO3 · sharded state
"""

from solutions import model_state
from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def sharded_state_dict(self, optimizer):
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for index, flat_parameter in enumerate(self.flat_parameters):
            shard, group = flat_parameter.shard, flat_parameter.layout.group
            mesh = model_state.DeviceMesh.from_group(group or right.dist.group.WORLD, shard.device.type)
            for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
                if right.torch.is_tensor(value) and value.shape == shard.shape:
                    placements = [model_state.Shard(0)]
                    value = model_state.DTensor.from_local(value.detach(), mesh, placements, run_check=False)
                state[f"{index}.{name}"] = value
        return state
