"""Gathers the logits where the vocabulary has padding, because then the loss is easier to compute.

caught by: parallelize · models
"""

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        if targets is None or self.output.weight.shape[0] * right.dist.get_world_size(self.group) == (
            self.config.vocab_size
        ):
            return super().forward(tokens, targets, has_copies)
        logits = super().forward(tokens)
        return right.F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
