"""Takes every entry with as many elements as the shard for a shard, also Adam's step if the shard has one element.

caught by: ZeRO3 · sharded state
"""

import torch

from solutions import zero3 as right
from solutions.model_state import as_dtensor


class ZeRO3(right.ZeRO3):
    def sharded_state_dict(self, optimizer):
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for index, flat_parameter in enumerate(self.flat_parameters):
            shard, layout = flat_parameter.shard, flat_parameter.layout
            for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
                is_sharded = torch.is_tensor(value) and value.numel() == shard.numel()
                state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
        return state
