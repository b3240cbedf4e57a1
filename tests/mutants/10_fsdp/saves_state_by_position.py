"""Finds the optimizer's state of a shard by its position, although the optimizer may have only some of the shards.

caught by: ZeRO3 · trained shards
"""

import torch

from solutions import zero3 as right
from solutions.model_state import as_dtensor


class ZeRO3(right.ZeRO3):
    def sharded_state_dict(self, optimizer):
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        entries_of = optimizer.state_dict()["state"]
        for index, flat_parameter in enumerate(self.flat_parameters):
            shard, layout = flat_parameter.shard, flat_parameter.layout
            for name, value in ({"shard": shard} | entries_of.get(index, {})).items():
                is_sharded = torch.is_tensor(value) and value.shape == shard.shape
                state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
        return state
