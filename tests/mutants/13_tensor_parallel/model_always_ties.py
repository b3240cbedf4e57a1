"""Ties the output layer to the embedding even if it has a weight of its own.

caught by: parallelize · models
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.output.weight = model.token_embedding.weight
    return model
