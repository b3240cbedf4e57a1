"""Allocates a new flat_param for each unshard, although autograd has saved views of the old one.

caught by: ShardedFlatParameter · storage
"""

import torch

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def unshard(self):
        self.flat_param = torch.empty(self.flat_param.shape, dtype=self.flat_param.dtype, device=self.shard.device)
        self._alias_parameters()
        return super().unshard()
