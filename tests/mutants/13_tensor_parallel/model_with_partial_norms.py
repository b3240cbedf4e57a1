"""With sequence parallelism, leaves the gradients of norms and positions partial.

caught by: parallelize · sequence parallelism
"""

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=True):
        return super().forward(tokens, targets, has_copies)


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
