"""The output layer does not get `enter`, so with sequence parallelism, nothing gathers its tokens.

caught by: parallelize · sequence parallelism
"""

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.output.enter = right.copy_to_ranks
    return model
