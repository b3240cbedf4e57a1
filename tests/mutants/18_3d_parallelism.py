"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

from shared import formulas
from solutions import layouts


def groups_begin_at_the_rank():
    """Lists a group from the rank on, and then from its beginning.

    caught by: ranks_along · the table's groups
    """

    def ranks_along(axis, rank, sizes):
        group = layouts.ranks_along(axis, rank, sizes)
        index = group.index(rank)
        return group[index:] + group[:index]


def groups_of_eight_ranks():
    """Searches the first eight ranks only.

    caught by: ranks_along · groups
    """

    def ranks_along(axis, rank, sizes):
        return [each for each in layouts.ranks_along(axis, rank, sizes) if each < 8]


def groups_remove_their_axis():
    """Removes the axis from the caller's dictionary.

    caught by: ranks_along · the table's groups
    """

    def ranks_along(axis, rank, sizes):
        found = layouts.ranks_along(axis, rank, sizes)
        del sizes[axis]
        return found


def groups_without_the_rank():
    """Leaves the rank itself out of its group.

    caught by: ranks_along · the table's groups
    """

    def ranks_along(axis, rank, sizes):
        return [each for each in layouts.ranks_along(axis, rank, sizes) if each != rank]


def bytes_in_both_directions():
    """Counts outputs and gradients of a stage, although each goes to another stage.

    caught by: step_bytes · small meshes
    """

    def step_bytes(shape, sizes, sequences):
        found = layouts.step_bytes(shape, sizes, sequences)
        found["pp"] *= 2
        return found


def bytes_in_float32():
    """Takes gradients to have four bytes per element.

    caught by: step_bytes · small meshes
    """

    def step_bytes(shape, sizes, sequences):
        found = layouts.step_bytes(shape, sizes, sequences)
        found["dp"] *= 2
        return found


def bytes_of_a_shard_of_the_outputs():
    """Lets each tp rank send a part of the outputs.

    caught by: step_bytes · step
    """

    def step_bytes(shape, sizes, sequences):
        tp = sizes["tp"]
        found = layouts.step_bytes(shape, sizes, sequences)
        found["pp"] /= tp
        return found


def bytes_of_all_layers():
    """Counts the all-reduces of all stages.

    caught by: step_bytes · step
    """

    def step_bytes(shape, sizes, sequences):
        dp, tp = sizes["dp"], sizes["tp"]
        tokens = sequences * shape.context / dp
        found = layouts.step_bytes(shape, sizes, sequences)
        found["tp"] = formulas.tensor_parallel_sent_bytes(tokens, shape.hidden, shape.layers, tp)
        return found


def bytes_of_all_sequences():
    """Lets each replica process the whole batch.

    caught by: step_bytes · step
    """

    def step_bytes(shape, sizes, sequences):
        pp, tp = sizes["pp"], sizes["tp"]
        layers = shape.layers / pp
        found = layouts.step_bytes(shape, sizes, sequences)
        found["tp"] = formulas.tensor_parallel_sent_bytes(sequences * shape.context, shape.hidden, layers, tp)
        return found


def bytes_of_one_way_around():
    """Takes the all-reduce for a reduce-scatter.

    caught by: step_bytes · small meshes
    """

    def step_bytes(shape, sizes, sequences):
        dp, pp, tp = sizes["dp"], sizes["pp"], sizes["tp"]
        found = layouts.step_bytes(shape, sizes, sequences)
        found["dp"] = formulas.reduce_scatter_sent_bytes(2 * shape.parameters / (pp * tp), dp)
        return found


def bytes_of_whole_gradients():
    """Averages the gradients of the whole model on each rank.

    caught by: step_bytes · step
    """

    def step_bytes(shape, sizes, sequences):
        dp = sizes["dp"]
        found = layouts.step_bytes(shape, sizes, sequences)
        found["dp"] = formulas.all_reduce_sent_bytes(2 * shape.parameters, dp)
        return found
