"""Sends values in the bucket's dtype, so bf16 rounds what was kept in float32.

caught by: TopK · wire
"""

import torch
import torch.distributed as dist

from solutions import compression as right


class TopK(right.Compressor):
    def __init__(self, ratio):
        self.ratio = ratio

    def exchange(self, bucket):
        unsent, world_size = bucket.unsent, dist.get_world_size(bucket.group)
        count = max(1, round(self.ratio * unsent.numel()))
        indices = unsent.abs().topk(count).indices
        values = unsent[indices].to(bucket.flat.dtype)
        unsent[indices] = 0
        all_values = values.new_empty(world_size, count)
        all_indices = indices.new_empty(world_size, count, dtype=torch.int32)
        first = right.launch_all_gather(all_values.view(-1), values, bucket.group)
        second = right.launch_all_gather(all_indices.view(-1), indices.int(), bucket.group)
        yield first
        yield second

        total = torch.zeros_like(unsent)
        for values, indices in zip(all_values, all_indices.long(), strict=True):
            total[indices] += values
        bucket.flat.copy_(total)
