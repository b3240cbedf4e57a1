"""Expects every entry of the optimizer's state to be a tensor.

caught by: ZeRO3 · trained shards
"""

from solutions import zero3 as right
from solutions.model_state import as_dtensor


class ZeRO3(right.ZeRO3):
    def sharded_state_dict(self, optimizer):
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for index, flat_parameter in enumerate(self.flat_parameters):
            shard, layout = flat_parameter.shard, flat_parameter.layout
            for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
                state[f"{index}.{name}"] = as_dtensor(layout, value) if value.shape == shard.shape else value
        return state
