"""Makes each .grad a view of its slice only once: zero_grad() breaks the connection.

caught by: Bucket · zero_grad
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            parameter.grad = piece

    def pack(self, index):
        if self.parameters[index].grad is not None:
            self.parameters[index].grad /= dist.get_world_size(self.group)
