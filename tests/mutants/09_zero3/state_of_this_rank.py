"""Each rank saves its own part among zeros.

caught by: ZeRO3 · whole state
"""

import torch.distributed as dist

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def full_state_dict(self):
        before, right.collect = right.collect, self._among_zeros
        try:
            return super().full_state_dict()
        finally:
            right.collect = before

    def _among_zeros(self, part, group, to):
        whole = part.new_zeros(dist.get_world_size(group), part.numel())
        whole[dist.get_rank(group)] = part
        return whole.view(-1)
