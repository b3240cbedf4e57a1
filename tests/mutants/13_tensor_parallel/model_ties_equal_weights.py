"""Takes two weights for the same parameter if they have the same values.

caught by: parallelize · models
"""

import torch

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    is_tied = torch.equal(model.output.weight, model.token_embedding.weight)
    model = right.parallelize(model, group, sequence_parallel)
    if is_tied:
        model.output.weight = model.token_embedding.weight
    return model
