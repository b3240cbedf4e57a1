"""Ignores sequence_parallel.

caught by: parallelize · activations
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    return right.parallelize(model, group)
