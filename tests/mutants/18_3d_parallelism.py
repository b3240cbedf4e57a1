"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import math

from shared import formulas
from shared.planner.layouts import memory, step_time
from shared.planner.search import TIE, USABLE, possible
from solutions import layouts, parallel_3d
from solutions.layouts import bubble_s, coordinates, destinations, step_bytes


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

    caught by: choose_layouts · clusters
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_ignores_memory():
    """Chooses among all layouts, whether they fit or not.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_of_a_dictionary():
    """Returns seconds by layout instead of a list.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return {layout: seconds for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]}


def choice_of_all_that_fit():
    """Does not leave out layouts that are much slower.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered]


def choice_of_every_layout():
    """Keeps all layouts of the same sizes that are a tie.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            fastest[layout] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_of_the_first_of_each_size():
    """Keeps the first layout of each size, not the fastest.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_of_the_last_of_each_size():
    """Keeps the last layout of each size that fits.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_of_the_smallest():
    """Of the layouts with the same sizes, keeps the one that needs the least memory.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            held = memory(job, layout).total_bytes
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or held < fastest[layout.sizes][2]:
                fastest[layout.sizes] = seconds, layout, held
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout, _ in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_of_the_winner():
    """Returns only the fastest layout.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= ordered[0][0]]


def choice_ties_with_what_does_not_fit():
    """Compares with the fastest layout of all, also if it does not fit.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest, least = {}, math.inf
        for layout in possible(job, cluster):
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            least = min(least, seconds)
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * least]


def choice_unsorted():
    """Returns the layouts in the order of the search.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = list(fastest.values())
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * min(pair[0] for pair in ordered)]


def choice_within_a_tenth():
    """Takes half of the error for a tie.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE / 2) * ordered[0][0]]


def choice_without_a_pipeline():
    """Tries no pipeline.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if layout.pp > 1 or memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_without_recomputation():
    """Never recomputes activations.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if layout.checkpointing != "none" or memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_without_zero_3():
    """Shards no parameters.

    caught by: choose_layouts · situations
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if layout.zero_stage == 3 or memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]


def choice_must_exist():
    """Fails if nothing fits.

    caught by: choose_layouts · nothing fits
    """

    def choose_layouts(job, cluster):
        fastest = {}
        for layout in possible(job, cluster):
            if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
                continue
            seconds = step_time(job, layout, cluster, bubble_s).total_s
            if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
                fastest[layout.sizes] = seconds, layout
        ordered = sorted(fastest.values(), key=lambda pair: pair[0])
        limit = (1 + TIE) * ordered[0][0]
        return [layout for seconds, layout in ordered if seconds <= limit]


def bubble_counts_the_slowest_stage():
    """Also counts the stage that waits.

    caught by: bubble_s · equal stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) + (layout.pp - 1) * message_s
        if layout.schedule == "interleaved":
            return waits_s / layout.chunks
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def bubble_of_equal_stages():
    """Takes all stages for as slow as the slowest one.

    caught by: bubble_s · stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = (layout.pp - 1) * max(busy_s) + (layout.pp - 1) * message_s
        if layout.schedule == "interleaved":
            return waits_s / layout.chunks
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def bubble_of_the_last_stage():
    """Takes the last stage for the slowest one.

    caught by: bubble_s · stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) - busy_s[-1] + (layout.pp - 1) * message_s
        if layout.schedule == "interleaved":
            return waits_s / layout.chunks
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def bubble_with_a_message_per_stage():
    """Counts one message too many.

    caught by: bubble_s · stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) - max(busy_s) + layout.pp * message_s
        if layout.schedule == "interleaved":
            return waits_s / layout.chunks
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def bubble_without_chunks():
    """Does not divide by the chunks.

    caught by: bubble_s · equal stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) - max(busy_s) + (layout.pp - 1) * message_s
        if layout.schedule == "interleaved":
            return waits_s
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def bubble_without_messages():
    """Lets the first micro-batch cross the links in no time.

    caught by: bubble_s · stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) - max(busy_s)
        if layout.schedule == "interleaved":
            return waits_s / layout.chunks
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def bubble_whole_with_zero_bubble():
    """Lets the zero-bubble schedule wait as long as 1F1B.

    caught by: bubble_s · equal stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) - max(busy_s) + (layout.pp - 1) * message_s
        if layout.schedule == "interleaved":
            return waits_s / layout.chunks
        return waits_s


def bubble_divides_messages_by_nothing():
    """Divides only the busy time by the chunks.

    caught by: bubble_s · stages
    """

    def bubble_s(busy_s, message_s, layout):
        waits_s = sum(busy_s) - max(busy_s) + (layout.pp - 1) * message_s
        if layout.schedule == "interleaved":
            return (sum(busy_s) - max(busy_s)) / layout.chunks + (layout.pp - 1) * message_s
        return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s
