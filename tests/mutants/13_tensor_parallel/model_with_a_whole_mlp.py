"""Leaves the MLPs whole on every rank.

caught by: parallelize · plain model
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    mlps = [(block.up, block.down) for block in model.blocks]
    model = right.parallelize(model, group, sequence_parallel)
    for block, mlp in zip(model.blocks, mlps, strict=True):
        block.up, block.down = mlp
    return model
