"""A backward all-reduce is missing in every attention: the loss falls, only more slowly.

caught by: parallelize · plain model
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    if not sequence_parallel:
        for block in model.blocks:
            block.attention.query_key_value.enter = lambda x, group: x
    return model
