"""Takes the part of its rank in the world, not in the group.

caught by: ZeRO1 · another world size
"""

import torch.distributed as dist

from solutions import zero1 as right


class _Elsewhere(right.FlatParameters):
    def own(self, flat):
        size = dist.get_world_size(self.group)
        return flat.view(size, -1)[dist.get_rank() % size]


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        for each in self.gradients:
            each.home.__class__ = _Elsewhere
        super().load_state_dict(state_dict)
        for each in self.gradients:
            each.home.__class__ = right.FlatParameters
