"""Adds up norms, not their squares.

caught by: ClipsGradients · values
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        shards = [each.home.shard.grad for each in self.gradients]
        norm = sum(shard.double().norm() for shard in shards)
        dist.all_reduce(norm, group=self.group)
        for shard in shards:
            shard *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
