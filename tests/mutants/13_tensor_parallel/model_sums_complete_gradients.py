"""Adds up the gradients of replicated parameters although they are complete.

caught by: parallelize · plain model
"""

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        if has_copies:
            return super().forward(tokens, targets, True)
        return right.functional_call(self, self.replicated_copies(), (tokens, targets, True))


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
