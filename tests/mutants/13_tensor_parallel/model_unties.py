"""Gives the output layer a weight of its own.

caught by: parallelize · plain model
"""

from torch import nn

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    return model
