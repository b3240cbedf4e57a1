"""Gathers the quantized gradients of all ranks instead of adding up shards, as torch's quantization hooks do.

caught by: Int8 · wire
"""

import torch.distributed as dist
from torch import nn

from solutions import compression as right


class Int8(right.Compressor):
    def exchange(self, bucket):
        unsent, world_size = bucket.unsent, dist.get_world_size(bucket.group)
        numel = world_size * right.shard_numel(bucket)
        message = right.pack(*right.quantize(nn.functional.pad(unsent, (0, numel - unsent.numel()))))
        unsent -= right.dequantize(*right.unpack(message))[: unsent.numel()]
        gathered = message.new_empty(world_size, len(message))
        yield right.launch_all_gather(gathered.view(-1), message, bucket.group)
        bucket.flat.copy_(right.dequantize(*right.unpack(gathered)).sum(0)[: unsent.numel()])
