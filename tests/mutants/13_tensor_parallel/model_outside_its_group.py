"""Builds the output layer for all ranks.

caught by: parallelize · group
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.output.group = None
    return model
