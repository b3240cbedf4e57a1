"""Freezes the position embedding because it is not split.

caught by: parallelize · AdamW
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.position_embedding.requires_grad_(False)
    return model
