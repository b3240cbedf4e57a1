"""Without targets, gathers logits that autograd does not record, so a loss of one's own trains nothing.

caught by: parallelize · models
"""

import torch

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        with torch.set_grad_enabled(targets is not None):
            return super().forward(tokens, targets, has_copies)


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
