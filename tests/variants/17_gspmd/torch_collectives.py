"""Written with torch's own collectives on lists of tensors, and with all plans in one queue."""

import heapq
import math
from itertools import count

import torch
import torch.distributed as dist

from shared.placements import ADD, EINSUM, LINEAR, MAX, Equation, Mesh, Partial, Replicate, Shard, dim_of
from solutions.gspmd import Layouts, MeshGroup, Plan, Rule, check_lengths, compute, make_mesh_group  # noqa: F401


def local_part(tensor, placement, index, size):
    match placement:
        case Replicate():
            return tensor.clone()
        case Partial():
            return tensor * (index == 0)
    piece, rest = divmod(tensor.size(placement.dim), size)
    if rest:
        raise ValueError(
            f"dimension {placement.dim}: {piece * size + rest} elements and {size} ranks, so shards differ"
        )
    return tensor.narrow(placement.dim, index * piece, piece)


def whole_from(parts, placement):
    match placement:
        case Shard():
            return torch.concatenate([*parts], dim=placement.dim)
        case Partial():
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total
    return parts[0]


def letter_rule(equation, letter):
    placed = [(term.index(letter) if letter in term else None) for term in (*equation.inputs, equation.output)]
    *inputs, output = [Replicate() if dim is None else Shard(dim) for dim in placed]
    if letter not in equation.output:
        output = Partial()
    return Rule(tuple(inputs), output)


def shard_rules(equation):
    replicated = Rule(tuple(Replicate() for _ in equation.inputs), Replicate())
    kept = [letter for letter in equation.letters if letter in equation.output or equation.operation != MAX]
    return [replicated] + [letter_rule(equation, letter) for letter in kept]


def partial_rules(equation):
    operands = len(equation.inputs)
    if equation.operation == EINSUM:
        chosen = [
            [Replicate()] * each + [Partial()] + [Replicate()] * (operands - each - 1) for each in range(operands)
        ]
    elif equation.operation in (ADD, *LINEAR):
        chosen = [[Partial()] * operands]
    else:
        chosen = []
    return [Rule(tuple(inputs), Partial()) for inputs in chosen]


def reshape_rules(equation):
    pairs = [(dim_of(letter, equation.inputs[0]), dim_of(letter, equation.output)) for letter in equation.letters]
    sharded = [Rule((Shard(before),), Shard(after)) for before, after in pairs if None not in (before, after)]
    return [Rule((Replicate(),), Replicate()), *sharded]


def local_shape(equation, shape):
    (term,) = equation.inputs
    known = {each: equation.lengths[each] for letters in term for each in letters[1:]}
    first = {
        letters[0]: length // math.prod(map(known.get, letters[1:]))
        for letters, length in zip(term, shape, strict=True)
    }
    return [math.prod((known | first)[each] for each in letters) for letters in equation.output]


def operation_for(before, after):
    if before == after or (isinstance(before, Shard) and isinstance(after, Partial)):
        return None
    receives = {Shard: 0, Replicate: 1, Partial: 2}
    names = [
        ["all_to_all", "all_gather", None],
        ["slice", None, "keep_one"],
        ["reduce_scatter", "all_reduce", None],
    ]
    return names[receives[type(before)]][receives[type(after)]]


def rounds_and_bytes(operation, buffer_bytes, size):
    if operation == "all_reduce":
        halves = [rounds_and_bytes(half, buffer_bytes, size) for half in ("reduce_scatter", "all_gather")]
        return sum(rounds for rounds, _ in halves), sum(sent_bytes for _, sent_bytes in halves)
    if operation == "all_to_all":
        return rounds_and_bytes("all_gather", buffer_bytes / size, size)
    return (size - 1, buffer_bytes * (1 - 1 / size)) if operation in ("all_gather", "reduce_scatter") else (0, 0)


def plan_for(equation, placements, mesh):
    """Put every way into one queue, and take the first."""
    layouts, queue, number = Layouts(equation, placements, mesh), [], count()
    routes = [layouts.routes(operand) for operand in range(len(equation.inputs))]
    for inputs, output in layouts.rules():
        steps = tuple(step for operand, each in enumerate(inputs) for step in routes[operand][each])
        later_s = layouts.seconds_to_finish(output)
        plan = Plan(steps, output, later_s + sum(step.seconds(mesh) for step in steps))
        heapq.heappush(queue, (plan.cost, next(number), plan))
    return heapq.heappop(queue)[-1]


def propagate(equation, placements, mesh):
    plan = plan_for(Equation.parse(equation), placements, Mesh.of(mesh))
    collectives = [step for step in plan.steps if step.operation not in ("slice", "keep_one")]
    return (plan.output[0] if len(plan.output) == 1 else plan.output), collectives


@torch.no_grad()
def redistribute(shard, before, after, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if before == after:
        return shard
    if isinstance(before, Shard) and isinstance(after, Partial):
        raise ValueError("an all-gather, and then zeros on all ranks but one")
    if isinstance(before, Replicate):
        return local_part(shard, after, rank, size).clone()
    if isinstance(after, Replicate) and isinstance(before, Partial):
        total = shard.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total
    if isinstance(after, Replicate):
        gathered = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(gathered, shard.contiguous(), group=group)
        return torch.cat(gathered, before.dim)
    pieces = [local_part(shard, after, index, size).contiguous() for index in range(size)]
    if isinstance(before, Partial):
        own = torch.empty_like(pieces[rank])
        dist.reduce_scatter(own, pieces, group=group)
        return own
    received = torch.empty(size, *pieces[0].shape, dtype=shard.dtype, device=shard.device)
    dist.all_to_all_single(received, torch.stack(pieces), group=group)
    return torch.cat(received.unbind(), before.dim)


@torch.no_grad()
def execute(equation, shards, placements, mesh_group=None):
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    held = dict(enumerate(shards))
    for step in plan_for(parsed, placements, mesh_group.mesh).steps:
        held[step.operand] = redistribute(held[step.operand], step.before, step.after, mesh_group.groups[step.axis])
    return compute(parsed, [held[operand] for operand in range(len(held))])


def ranks_along(sizes, axis):
    stride = math.prod(sizes[axis + 1 :])
    starts = [rank for rank in range(math.prod(sizes)) if rank // stride % sizes[axis] == 0]
    return [[start + index * stride for index in range(sizes[axis])] for start in starts]


def may_change(placements, axis, after):
    inner = set(placements[axis + 1 :]) - {Replicate(), Partial()}
    return not inner & {placements[axis], after}
