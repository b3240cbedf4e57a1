"""Keeps the whole model for a state dict.

caught by: parallelize · memory
"""

import copy

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    whole = copy.deepcopy(model)
    model = right.parallelize(model, group, sequence_parallel)
    model.whole = [whole]
    return model
