"""Adds the gradient to its slice even if it already is that slice.

caught by: Bucket · zero_grad
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def pack(self, index):
        parameter, piece = self.parameters[index], self.slices[index]
        if parameter.grad is None:
            piece.zero_()
        else:
            if parameter.grad is not piece:
                piece.zero_()
            piece += parameter.grad / dist.get_world_size(self.group)
        parameter.grad = piece
