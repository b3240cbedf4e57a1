"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import math
from itertools import product

from shared import formulas
from shared.planner import meshes
from shared.planner.meshes import Layout
from solutions import layouts, parallel_3d
from solutions.layouts import can_split, coordinates, destinations, step_bytes


def coordinates_from_the_first_axis():
    """Lets the first axis change fastest, as if it were the innermost one.

    caught by: coordinates · the table
    """

    def coordinates(rank, sizes):
        found = {}
        for axis, size in sizes.items():
            rank, found[axis] = divmod(rank, size)
        return found


def coordinates_in_reverse():
    """Returns the axes from the innermost to the outermost.

    caught by: coordinates · the table
    """

    def coordinates(rank, sizes):
        found = {}
        for axis, size in reversed(sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found


def coordinates_of_three_axes():
    """Knows no other axes than dp, pp and tp, in this order.

    caught by: coordinates · meshes
    """

    def coordinates(rank, sizes):
        pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
        return {"dp": rank // (pp * tp), "pp": rank // tp % pp, "tp": rank % tp}


def coordinates_use_up_the_sizes():
    """Takes the axes out of the caller's dictionary.

    caught by: coordinates · the table
    """

    def coordinates(rank, sizes):
        found, order = {}, list(sizes)
        while sizes:
            axis, size = sizes.popitem()
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in order}


def coordinates_with_a_square_stride():
    """Takes every axis to be as long as the one inside it.

    caught by: coordinates · meshes
    """

    def coordinates(rank, sizes):
        found = {}
        for index, (axis, size) in enumerate(reversed(sizes.items())):
            found[axis] = rank // size**index % size
        return {axis: found[axis] for axis in sizes}


def coordinates_without_carrying():
    """Divides the rank itself for each axis, and not what is left of it.

    caught by: coordinates · the table
    """

    def coordinates(rank, sizes):
        return {axis: rank % size for axis, size in sizes.items()}


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


def groups_of_neighbors():
    """Takes consecutive ranks, whatever the axis is.

    caught by: ranks_along · the table's groups
    """

    def ranks_along(axis, rank, sizes):
        first = rank - rank % sizes[axis]
        return list(range(first, first + sizes[axis]))


def groups_of_the_same_coordinate():
    """Collects the ranks that have the same coordinate on the axis.

    caught by: ranks_along · the table's groups
    """

    def ranks_along(axis, rank, sizes):
        own = coordinates(rank, sizes)[axis]
        return [each for each in range(math.prod(sizes.values())) if coordinates(each, sizes)[axis] == own]


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


def leaving_counts_everything():
    """Counts what stays inside the host, too.

    caught by: leaving_bytes · plain hosts
    """

    def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
        sent_bytes = step_bytes(shape, sizes, sequences)
        own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

        def crossing(axis):
            return sum(len(destinations(axis, rank, sizes)) for rank in own)

        return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def leaving_counts_ranks():
    """Counts a rank once, even if both of its neighboring stages are on other hosts.

    caught by: leaving_bytes · hosts
    """

    def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
        sent_bytes = step_bytes(shape, sizes, sequences)
        own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

        def crossing(axis):
            return sum(any(to not in own for to in destinations(axis, rank, sizes)) for rank in own)

        return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def leaving_from_host_0():
    """Asks the ranks of host 0 what they send to other hosts than the given one.

    caught by: leaving_bytes · hosts
    """

    def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
        sent_bytes = step_bytes(shape, sizes, sequences)

        def crossing(axis):
            own = range(ranks_per_host)
            return sum(to // ranks_per_host != host for rank in own for to in destinations(axis, rank, sizes))

        return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def leaving_of_host_0():
    """Looks at the ranks of host 0, whichever host is asked for.

    caught by: leaving_bytes · hosts
    """

    def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
        sent_bytes = step_bytes(shape, sizes, sequences)
        own = range(ranks_per_host)

        def crossing(axis):
            return sum(to not in own for rank in own for to in destinations(axis, rank, sizes))

        return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def leaving_the_last_rank():
    """Looks only at the last rank of the host.

    caught by: leaving_bytes · plain hosts
    """

    def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
        sent_bytes = step_bytes(shape, sizes, sequences)
        own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

        def crossing(axis):
            return sum(to not in own for to in destinations(axis, own[-1], sizes))

        return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def leaving_to_larger_ranks():
    """Counts only destinations behind the host.

    caught by: leaving_bytes · hosts
    """

    def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
        sent_bytes = step_bytes(shape, sizes, sequences)
        own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

        def crossing(axis):
            return sum(to > own[-1] for rank in own for to in destinations(axis, rank, sizes))

        return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def averages_over_tp():
    """Averages gradients over tp, where each rank has other shards.

    caught by: Parallel3D · plain replicas
    """

    class Parallel3D(parallel_3d.Parallel3D):
        def __init__(self, model, mesh, *arguments, **options):
            self.tp_group = mesh.get_group("tp")
            super().__init__(model, mesh, *arguments, **options)

        def add_data_parallelism(self, *arguments):
            own, self.dp_group = self.dp_group, self.dp_group if self.zero_stage else self.tp_group
            super().add_data_parallelism(*arguments)
            self.dp_group = own


def ignores_the_zero_stage():
    """Never shards the optimizer state.

    caught by: Parallel3D · memory
    """

    class Parallel3D(parallel_3d.Parallel3D):
        def add_data_parallelism(self, *arguments):
            self.zero_stage = 0
            super().add_data_parallelism(*arguments)


def keeps_the_whole_model():
    """Keeps the model, and with it the layers of all stages.

    caught by: Parallel3D · memory
    """

    class Parallel3D(parallel_3d.Parallel3D):
        def __init__(self, model, *arguments, **options):
            super().__init__(model, *arguments, **options)
            self.whole = [model]


def zero_1_inside_the_replica():
    """Shards the optimizer state over tp, where each rank has other parameters.

    caught by: Parallel3D · ZeRO-1
    """

    class Parallel3D(parallel_3d.Parallel3D):
        def __init__(self, model, mesh, *arguments, **options):
            self.tp_group = mesh.get_group("tp")
            super().__init__(model, mesh, *arguments, **options)

        def add_data_parallelism(self, *arguments):
            own, self.dp_group = self.dp_group, self.tp_group if self.zero_stage else self.dp_group
            super().add_data_parallelism(*arguments)
            self.dp_group = own


def zero_1_over_the_world():
    """Averages and shards over all ranks with ZeRO-1.

    caught by: Parallel3D · ZeRO-1
    """

    class Parallel3D(parallel_3d.Parallel3D):
        def add_data_parallelism(self, *arguments):
            own, self.dp_group = self.dp_group, None if self.zero_stage else self.dp_group
            super().add_data_parallelism(*arguments)
            self.dp_group = own


def choice_fills_the_gpu():
    """Leaves no memory free.

    caught by: choose_layout · clusters
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_ignores_memory():
    """Chooses the fastest layout, whether it fits or not.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_is_a_plain_tuple():
    """Returns a plain tuple, which has no fields.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        chosen = layouts.choose_layout(shape, cluster, sequences)
        return chosen and tuple(chosen)


def choice_must_exist():
    """Fails if nothing fits.

    caught by: choose_layout · nothing fits
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference)


def choice_of_full_pipelines():
    """Leaves out pipelines with fewer micro-batches than stages.

    caught by: choose_layout · clusters
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences) or sequences // layout.dp < pp:
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_of_most_replicas():
    """Prefers more replicas to a faster step.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return -layout.dp, step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_of_powers_of_two():
    """Tries powers of two only.

    caught by: choose_layout · clusters
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0 and size & (size - 1) == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_of_the_first():
    """Takes the first layout that fits.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        return next(iter(fitting), None)


def choice_of_the_smallest():
    """Chooses the layout that holds the least.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return meshes.held_bytes(shape, layout, sequences), step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_of_tp_up_to_eight():
    """Never tries more than eight tp ranks.

    caught by: choose_layout · clusters
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, (1, 2, 3, 4, 6, 8), (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_of_whole_hosts():
    """Always lets tp fill a host.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or tp != cluster.gpus_per_host or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_prefers_zero_1():
    """Prefers ZeRO-1 where both stages are equally fast.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, -layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_splits_unevenly():
    """Does not ask whether the model can be split evenly.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus:
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_without_a_pipeline():
    """Tries no pipeline.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product((1,), divisors, (0, 1)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)


def choice_without_zero_1():
    """Tries no ZeRO-1.

    caught by: choose_layout · situations
    """

    def choose_layout(shape, cluster, sequences):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        fitting = []
        for pp, tp, zero_stage in product(divisors, divisors, (0,)):
            layout = Layout(cluster.gpus // (pp * tp), pp, tp, zero_stage)
            if layout.gpus != cluster.gpus or not can_split(shape, layout, sequences):
                continue
            if meshes.held_bytes(shape, layout, sequences) <= meshes.ROOM * cluster.gpu_bytes:
                fitting.append(layout)

        def preference(layout):
            step_s = meshes.step_s(shape, cluster, layout, sequences)
            return step_s, layout.zero_stage

        return min(fitting, key=preference, default=None)
