"""With sequence parallelism, every rank uses the positions of the first rank's tokens.

caught by: parallelize · sequence parallelism
"""

from unittest import mock

from solutions import tensor_parallel as right


def first_part(tensor, dim, group, what):
    own = right_own_shard(tensor, dim, group, what)
    return tensor.narrow(dim, 0, own.shape[dim]) if what == "the tokens" else own


right_own_shard = right.own_shard


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        with mock.patch.object(right, "own_shard", first_part):
            return super().forward(tokens, targets, has_copies)


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
