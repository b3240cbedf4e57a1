"""Matches placements, keeps rules in dicts, cuts by narrow(), and finds the cheapest steps by relaxation."""

import itertools
import math

import torch
import torch.distributed as dist

from shared.placements import EINSUM, LINEAR, Equation, Mesh, Partial, Replicate, Shard, dim_of
from shared.spmd.partitioning import changed as stepped
from solutions import gspmd as right
from solutions.gspmd import Rule, local_shape, make_mesh_group  # noqa: F401


def local_part(tensor, placement, index, size):
    match placement:
        case Shard(dim):
            length, rest = divmod(tensor.size(dim), size)
            if rest:
                raise ValueError(f"{tensor.size(dim)} elements for {size} ranks")
            return tensor.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)
        case Partial():
            return tensor if not index else tensor * 0 if tensor.isfinite().all() else torch.zeros_like(tensor)
        case _:
            return tensor


def whole_from(parts, placement):
    match placement:
        case Shard(dim):
            return torch.cat([*parts], dim=dim)
        case Partial():
            total = torch.zeros_like(parts[0])
            for part in parts:
                total = total + part
            return total
        case _:
            return parts[-1]


def shard_rules(equation):
    found = {None: Rule(tuple(Replicate() for _ in equation.inputs), Replicate())}
    for letter in equation.letters:
        inputs = []
        for term in equation.inputs:
            inputs.append(Shard(dim_of(letter, term)) if dim_of(letter, term) is not None else Replicate())
        kept = dim_of(letter, equation.output)
        if kept is None and equation.operation != EINSUM:
            continue
        found[letter] = Rule(tuple(inputs), Partial() if kept is None else Shard(kept))
    return [*found.values()]


def partial_rules(equation):
    count = len(equation.inputs)
    if equation.operation == EINSUM:
        table = [[Replicate()] * count for _ in range(count)]
        for index, row in enumerate(table):
            row[index] = Partial()
        return [Rule(tuple(row), Partial()) for row in table]
    return [Rule((Partial(),) * count, Partial())] if equation.operation in LINEAR else []


def rounds_and_bytes(operation, buffer_bytes, size):
    turns = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}.get(operation, 0)
    share = size if operation != "all_to_all" else size * size
    return turns * (size - 1), turns * (size - 1) * buffer_bytes / share


@torch.no_grad()
def redistribute(shard, before, after, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    operation = None if before == after else right.operation_for(before, after)
    if before != after and operation is None:
        raise ValueError(f"{before} cannot become {after}")
    if before == after:
        return shard
    if isinstance(before, Replicate):
        return local_part(shard, after, rank, size)
    if operation == "all_to_all":
        return right.all_to_all(shard, before, after, group)
    if isinstance(before, Shard):
        rows = right.ring_all_gather(shard, group).unflatten(0, (size, *shard.shape))
        return torch.cat(rows.unbind(0), before.dim)
    if isinstance(after, Shard):
        rows = torch.cat([local_part(shard, after, index, size).flatten() for index in range(size)])
        return right.ring_reduce_scatter(rows, group).view(local_part(shard, after, 0, size).shape)
    total = torch.clone(shard)
    right.ring_all_reduce(total, group)
    return total


def ranks_along(sizes, axis):
    strides = [math.prod(sizes[each + 1 :]) for each in range(len(sizes))]
    others = [range(size) if each != axis else (0,) for each, size in enumerate(sizes)]
    begins = [sum(map(int.__mul__, at, strides)) for at in itertools.product(*others)]
    return [[begin + step * strides[axis] for step in range(sizes[axis])] for begin in begins]


def may_change(placements, axis, after):
    later = set(placements[axis + 1 :])
    return not any(isinstance(each, Shard) and each in later for each in (placements[axis], after))


def reshape_rules(equation):
    first_of = [{letters[0]: dim for dim, letters in enumerate(term)} for term in (*equation.inputs, equation.output)]
    before, after = first_of
    both = [letter for letter in before if letter in after]
    return [Rule((Replicate(),), Replicate()), *(Rule((Shard(before[x]),), Shard(after[x])) for x in both)]


def _routes(layouts, operand):
    """Relax all steps until no route gets cheaper."""
    best, changed = {layouts.starts[operand]: ((0.0, 0), ())}, True
    while changed:
        changed = False
        for placements, (_, steps) in list(best.items()):
            for step in layouts.steps_from(operand, placements):
                longer = (*steps, step)
                cost = right.rounded(sum(each.seconds(layouts.mesh) for each in longer)), len(longer)
                after = stepped(placements, step)
                if after not in best or cost < best[after][0]:
                    best[after], changed = (cost, longer), True
    return {placements: steps for placements, (_, steps) in best.items()}


def _cheapest(equation, placements, mesh):
    layouts = right.Layouts(Equation.parse(equation), placements, Mesh.of(mesh))
    routes = [_routes(layouts, operand) for operand in range(len(layouts.starts))]
    found = []
    for inputs, output in layouts.rules():
        steps = [*itertools.chain(*(routes[operand][target] for operand, target in enumerate(inputs)))]
        collectives = [step for step in steps if step.is_collective]
        seconds = sum(step.seconds(layouts.mesh) for step in steps) + layouts.seconds_to_finish(output)
        found.append(((right.rounded(seconds), len(collectives), len(steps)), steps, collectives, output))
    return min(found, key=lambda each: each[0])[1:]


def propagate(equation, placements, mesh):
    _, collectives, output = _cheapest(equation, placements, mesh)
    return (output[0] if len(output) == 1 else output), collectives


@torch.no_grad()
def execute(equation, shards, placements, mesh_group=None):
    group = right.MeshGroup.of(mesh_group)
    right.check_lengths(Equation.parse(equation), shards, placements, group.mesh)
    parts = dict(enumerate(shards))
    for step in _cheapest(equation, placements, group.mesh)[0]:
        parts[step.operand] = redistribute(parts[step.operand], step.before, step.after, group.groups[step.axis])
    return right.compute(Equation.parse(equation), [parts[operand] for operand in sorted(parts)])
