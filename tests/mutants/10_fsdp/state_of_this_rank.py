"""Saves the rank's own shards and zeros for all others.

caught by: ZeRO3 · full state
"""

import torch.distributed as dist

from solutions import model_state
from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def full_state_dict(self):
        before, model_state.gather_shards = model_state.gather_shards, among_zeros
        try:
            return super().full_state_dict()
        finally:
            model_state.gather_shards = before


def among_zeros(shard, group):
    flat = shard.new_zeros(dist.get_world_size(group), shard.numel())
    flat[dist.get_rank(group)] = shard
    return flat.view(-1)
