"""Loads the shard of its global rank instead of its rank in the group.

caught by: ZeRO1 · another world size
"""

import torch.distributed as dist

from solutions import zero1 as right
from solutions.flat import FlatLayout


class _Layout(FlatLayout):
    def shard_of(self, flat):
        size = dist.get_world_size(self.group)
        return flat.view(size, -1)[dist.get_rank() % size]


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        for flat_parameter in self.flat_parameters:
            flat_parameter.layout.__class__ = _Layout
        super().load_state_dict(state_dict)
        for flat_parameter in self.flat_parameters:
            flat_parameter.layout.__class__ = FlatLayout
