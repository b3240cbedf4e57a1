"""The output layer's inputs do not pass through copy_to_ranks.

caught by: parallelize · plain model
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    if not sequence_parallel:
        model.output.enter = lambda x, group: x
    return model
