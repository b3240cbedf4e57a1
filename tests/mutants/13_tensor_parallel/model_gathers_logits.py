"""Gathers the logits and calls torch's cross_entropy.

caught by: parallelize · wire
"""

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        if targets is None or (self.sequence_parallel and not has_copies):
            return super().forward(tokens, targets, has_copies)
        logits = super().forward(tokens, None, has_copies)
        return right.F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
