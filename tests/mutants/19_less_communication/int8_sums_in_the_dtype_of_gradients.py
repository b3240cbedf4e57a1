"""Adds up in the bucket's dtype, and bf16 rounds sums in a way that no error feedback knows.

caught by: Int8 · sums
"""

import torch
import torch.distributed as dist

from solutions import compression as right


def dequantized(message):
    return right.dequantize(*right.unpack(message))


class Int8(right.Compressor):
    def exchange(self, bucket):
        rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
        unsent, numel = bucket.unsent, right.shard_numel(bucket)
        rows = unsent.new_zeros(world_size, numel)
        rows.view(-1)[: unsent.numel()] = unsent
        message = right.pack(*right.quantize(rows))
        unsent -= dequantized(message).view(-1)[: unsent.numel()]
        received, handle = right.all_to_all(message, bucket.group)
        yield handle

        total = dequantized(received).sum(0, dtype=bucket.flat.dtype)
        shard = right.pack(*right.quantize(total))
        own = unsent[rank * numel : (rank + 1) * numel]
        own += (total - dequantized(shard))[: len(own)]
        gathered = torch.empty_like(message)
        yield right.launch_all_gather(gathered.view(-1), shard, bucket.group)

        bucket.flat.copy_(dequantized(gathered).view(-1)[: unsent.numel()])
