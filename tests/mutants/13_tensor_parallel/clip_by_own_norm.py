"""Clips by the norm of what the rank itself has.

caught by: parallelize · plain norm
"""

import torch

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
