"""Written with DTensor, which cuts and redistributes. An all-to-all is ours: on a CPU, DTensor gathers."""

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from shared.placements import EINSUM, LINEAR, MAX, Equation, Mesh, Partial, Replicate, Shard
from solutions.gspmd import Layouts, MeshGroup, Plan, Rule, check_lengths, compute


def theirs(placement):
    if isinstance(placement, Shard):
        return dtensor.Shard(placement.dim)
    return dtensor.Partial() if isinstance(placement, Partial) else dtensor.Replicate()


def local_part(tensor, placement, index, size):
    if isinstance(placement, Partial):
        return tensor if index == 0 else tensor.new_zeros(tensor.shape)
    if isinstance(placement, Replicate):
        return tensor
    if tensor.shape[placement.dim] % size:
        raise ValueError(f"{size} ranks cannot get equal shards of {tensor.shape[placement.dim]} elements")
    pieces, _ = theirs(placement)._split_tensor(tensor, size, with_padding=False)
    return pieces[index]


def whole_from(parts, placement):
    if isinstance(placement, Replicate):
        return parts[-1]
    return (
        torch.stack(tuple(parts)).sum(0) if isinstance(placement, Partial) else torch.cat(tuple(parts), placement.dim)
    )


def shard_rules(equation):
    rules = [Rule(tuple(Replicate() for _ in equation.inputs), Replicate())]
    for letter in sorted(set(itertools.chain(*equation.inputs))):
        inputs = tuple(Shard(term.index(letter)) if letter in term else Replicate() for term in equation.inputs)
        if letter in equation.output:
            rules.append(Rule(inputs, Shard(equation.output.index(letter))))
        elif equation.operation != MAX:
            rules.append(Rule(inputs, Partial()))
    return rules


def partial_rules(equation):
    count = len(equation.inputs)
    if equation.operation != EINSUM:
        return [Rule((Partial(),) * count, Partial())] * (equation.operation in LINEAR)
    rows = torch.eye(count, dtype=torch.bool).tolist()
    return [Rule(tuple(Partial() if chosen else Replicate() for chosen in row), Partial()) for row in rows]


def operation_for(before, after):
    match before, after:
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all" if before.dim != after.dim else None
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Replicate(), Shard():
            return "slice"
        case Replicate(), Partial():
            return "keep_one"
    return None


def rounds_and_bytes(operation, buffer_bytes, size):
    rounds = {"all_gather": size - 1, "reduce_scatter": size - 1, "all_to_all": size - 1, "all_reduce": 2 * (size - 1)}
    piece_bytes = buffer_bytes / size / (size if operation == "all_to_all" else 1)
    return rounds.get(operation, 0), rounds.get(operation, 0) * piece_bytes


def plan_for(equation, placements, mesh):
    layouts, best = Layouts(equation, placements, mesh), None
    routes = [layouts.routes(operand) for operand, _ in enumerate(equation.inputs)]
    for inputs, output in layouts.rules():
        steps = tuple(itertools.chain.from_iterable(map(dict.__getitem__, routes, inputs)))
        seconds = math.fsum(step.seconds(mesh) for step in steps) + layouts.seconds_to_finish(output)
        plan = Plan(steps, output, seconds)
        best = plan if best is None or plan.cost < best.cost else best
    return best


def propagate(equation, placements, mesh):
    plan = plan_for(Equation.parse(equation), placements, Mesh.of(mesh))
    (only, *more) = plan.output
    return plan.output if more else only, [step for step in plan.steps if step.is_collective]


def redistribute(shard, before, after, group=None):
    size, operation = dist.get_world_size(group), operation_for(before, after)
    if before == after:
        return shard
    if operation is None:
        raise ValueError(f"{before} cannot become {after}")
    if operation == "keep_one":  # DTensor lets only its own code do this
        return local_part(shard, after, dist.get_rank(group), size)
    if isinstance(after, Shard) and (shard.shape[after.dim] % size):
        raise ValueError(f"{size} ranks cannot get equal shards of {shard.shape[after.dim]} elements")
    if operation == "all_to_all":
        received = [torch.empty_like(piece) for piece in shard.chunk(size, after.dim)]
        flat = torch.cat([piece.flatten() for piece in shard.chunk(size, after.dim)])
        into = torch.empty_like(flat)
        dist.all_to_all_single(into, flat, group=group)
        pieces = [one.view(like.shape) for one, like in zip(into.chunk(size), received, strict=True)]
        return torch.cat(pieces, before.dim)
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, shard.device.type)
    placed = dtensor.DTensor.from_local(shard, mesh, [theirs(before)], run_check=False)
    local = placed.redistribute(placements=[theirs(after)]).to_local()
    return local.clone() if operation == "slice" else wait_tensor(local)


def execute(equation, shards, placements, mesh_group=None):
    parsed, mesh_group, shards = Equation.parse(equation), MeshGroup.of(mesh_group), [*shards]
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    for step in plan_for(parsed, placements, mesh_group.mesh).steps:
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)


def make_mesh_group(mesh):
    mesh = Mesh.of(mesh)
    groups = []
    for axis, _ in enumerate(mesh.sizes):
        for members in ranks_along(mesh.sizes, axis):
            group = dist.new_group(members)
            if dist.get_rank() in members:
                groups.append(group)
    return MeshGroup(mesh, tuple(groups))


def ranks_along(sizes, axis):
    groups = {}
    for rank, coordinates in enumerate(itertools.product(*map(range, sizes))):
        groups.setdefault((*coordinates[:axis], *coordinates[axis + 1 :]), []).append(rank)
    return list(groups.values())


def may_change(placements, axis, after):
    dims = {each.dim for each in (placements[axis], after) if isinstance(each, Shard)}
    return all(not isinstance(later, Shard) or later.dim not in dims for later in placements[axis + 1 :])


def reshape_rules(equation):
    (term,), output = equation.inputs, equation.output
    firsts = {letters[0]: dim for dim, letters in enumerate(term)}
    shared = [(firsts[letters[0]], dim) for dim, letters in enumerate(output) if letters[0] in firsts]
    return [Rule((Replicate(),), Replicate()), *(Rule((Shard(a),), Shard(b)) for a, b in shared)]


def local_shape(equation, shape):
    lengths = dict(equation.lengths)
    for letters, length in zip(equation.inputs[0], shape, strict=True):
        lengths[letters[0]] = length
        for letter in letters[1:]:
            lengths[letters[0]] //= lengths[letter]
    return tuple(math.prod(lengths[letter] for letter in letters) for letters in equation.output)
