"""Truncates heads that N does not divide, without an error.

caught by: parallelize · rejections
"""

from unittest import mock

from solutions import tensor_parallel as right


def truncated(tensor, dim, group, what):
    size = right.dist.get_world_size(group)
    even = tensor.shape[dim] // size * size
    return shard_of(tensor.narrow(dim, 0, even), dim, group, what)


shard_of = right.own_shard


def parallelize(model, group=None, sequence_parallel=False):
    with mock.patch.object(right, "own_shard", truncated):
        return right.parallelize(model, group, sequence_parallel)
