"""Adds the error of the sum's rounding to the first shard on every rank.

caught by: Int8 · steps
"""

import torch
import torch.distributed as dist

from solutions import compression as right


def dequantized(message):
    return right.dequantize(*right.unpack(message))


class Int8(right.Compressor):
    def exchange(self, bucket):
        world_size = dist.get_world_size(bucket.group)
        unsent, numel = bucket.unsent, right.shard_numel(bucket)
        rows = unsent.new_zeros(world_size, numel)
        rows.view(-1)[: unsent.numel()] = unsent
        message = right.pack(*right.quantize(rows))
        unsent -= dequantized(message).view(-1)[: unsent.numel()]
        received, handle = right.all_to_all(message, bucket.group)
        yield handle

        total = dequantized(received).sum(0)
        shard = right.pack(*right.quantize(total))
        own = unsent[:numel]
        own += (total - dequantized(shard))[: len(own)]
        gathered = torch.empty_like(message)
        yield right.launch_all_gather(gathered.view(-1), shard, bucket.group)

        bucket.flat.copy_(dequantized(gathered).view(-1)[: unsent.numel()])
