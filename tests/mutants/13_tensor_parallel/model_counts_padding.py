"""The logits of padding take part in the loss.

caught by: parallelize · models
"""

from unittest import mock

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        with mock.patch.object(right.torch, "inf", 0.0):
            return super().forward(tokens, targets, has_copies)


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
