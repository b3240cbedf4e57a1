"""Trains correctly, but never splits the tokens.

caught by: parallelize · wire
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    return right.parallelize(model, group, False)
