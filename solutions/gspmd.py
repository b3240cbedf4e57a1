# Built by `make notebooks` from source/17_gspmd/lab.py: edit that, not this.
"""A partitioner: it decides how ranks run one operation on tensors that are placed on a mesh, and runs it.

For each axis of the mesh, there are rules: placements of the inputs for which no communication is needed. The
partitioner finds the cheapest way to bring the inputs into the placements of some rule, and takes the cheapest rule.

Source: Xu et al. 2021, "GSPMD", arXiv 2105.04663; torch.distributed.tensor (DTensor), which also chooses among rules.

N is the number of ranks along an axis, S the bytes of the tensor that these ranks hold together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.placements import (
    EINSUM,
    LINEAR,
    RESHAPE,
    Equation,
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    dim_of,
)
from shared.spmd import partitioning
from shared.spmd.partitioning import MeshGroup, check_lengths, operation_for, rounded
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def local_part(tensor: Tensor, placement: Placement, index: int, size: int) -> Tensor:
    """Return what rank `index` of `size` ranks holds of a tensor.

    Raises:
        ValueError: if the ranks cannot get equal shards.

    Shape: tensor of any shape; with Shard(dim), dimension dim of the result is 1/size as long.
    """
    if isinstance(placement, Shard):
        length = tensor.shape[placement.dim]
        if length % size:
            raise ValueError(f"{placement}: {length} elements cannot be divided equally among {size} ranks")
        return tensor.chunk(size, placement.dim)[index].contiguous()
    if isinstance(placement, Partial) and index > 0:
        return torch.zeros_like(tensor)
    return tensor


def whole_from(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the tensor of which each rank holds a part. The inverse of local_part."""
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    if isinstance(placement, Partial):
        return sum(parts)
    return parts[0]


@dataclass(frozen=True)
class Rule:
    """Placements along one axis of the mesh for which an operation needs no communication."""

    inputs: tuple[Placement, ...]
    output: Placement


def shard_rules(equation: Equation) -> list[Rule]:
    """Return the rule in which everything is replicated, and one for each letter along which the inputs can be sharded.

    Source: GSPMD, §3.2 and §4.2; DTensor's gen_einsum_strategies.
    """
    rules = [Rule((Replicate(),) * len(equation.inputs), Replicate())]
    for letter in equation.letters:
        dims = [dim_of(letter, term) for term in equation.inputs]
        inputs = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
        output_dim = dim_of(letter, equation.output)
        if output_dim is not None:
            rules.append(Rule(inputs, Shard(output_dim)))
        elif equation.operation == EINSUM:
            rules.append(Rule(inputs, Partial()))
    return rules


def partial_rules(equation: Equation) -> list[Rule]:
    """Return the rules in which inputs are sums that have not been computed yet. Their result is one, too."""
    operands = range(len(equation.inputs))
    if equation.operation == EINSUM:
        every = [tuple(Partial() if each == chosen else Replicate() for each in operands) for chosen in operands]
        return [Rule(inputs, Partial()) for inputs in every]
    if equation.operation in LINEAR:
        return [Rule((Partial(),) * len(operands), Partial())]
    return []


def rounds_and_bytes(operation: str, buffer_bytes: float, size: int) -> tuple[int, float]:
    """Return how many rounds an operation takes, and how many bytes each rank sends.

    Source: nccl-tests, PERFORMANCE.md.
    """
    rounds, sent_bytes = size - 1, (size - 1) / size * buffer_bytes
    return {
        "all_gather": (rounds, sent_bytes),
        "reduce_scatter": (rounds, sent_bytes),
        "all_reduce": (2 * rounds, 2 * sent_bytes),
        "all_to_all": (rounds, sent_bytes / size),
    }.get(operation, (0, 0.0))


def axis_rules(equation: Equation) -> list[Rule]:
    """Return all rules of an operation along one axis of the mesh."""
    of_shards = reshape_rules if equation.operation == RESHAPE else shard_rules
    return of_shards(equation) + partial_rules(equation)


@dataclass(frozen=True)
class Step(partitioning.Step):
    """Changes the placement of one operand along one axis of the mesh."""

    def seconds(self, mesh: Mesh) -> float:
        """Return α · rounds + β · bytes."""
        link, size = mesh.links[self.axis], mesh.sizes[self.axis]
        rounds, sent_bytes = rounds_and_bytes(self.operation, self.buffer_bytes, size)
        return link.alpha_s * rounds + link.beta_s_per_byte * sent_bytes


class Layouts(partitioning.Layouts):
    """Finds the rules of an operation on a mesh, and the cheapest routes of its inputs, by your rules and costs."""

    step_class = Step

    def axis_rules(self) -> list[Rule]:
        return axis_rules(self.equation)

    def may_change(self, placements: Placements, axis: int, after: Placement) -> bool:
        return may_change(placements, axis, after)


@dataclass(frozen=True)
class Plan:
    """How to run an operation: the steps that bring its inputs into the placements of a rule, and the result."""

    steps: tuple[Step, ...]
    output: Placements
    seconds: float

    @property
    def collectives(self) -> list[Step]:
        return [step for step in self.steps if step.is_collective]

    @property
    def cost(self) -> tuple[float, int, int]:
        return rounded(self.seconds), len(self.collectives), len(self.steps)


def plan_for(equation: Equation, placements: Sequence, mesh: Mesh) -> Plan:
    """Return the cheapest plan."""
    layouts = Layouts(equation, placements, mesh)
    routes = [layouts.routes(operand) for operand in range(len(equation.inputs))]
    plans = []
    for inputs, output in layouts.rules():
        pairs = zip(routes, inputs, strict=True)
        steps = [step for routes_of, target in pairs for step in routes_of[target]]
        seconds = sum(step.seconds(mesh) for step in steps) + layouts.seconds_to_finish(output)
        plans.append(Plan(tuple(steps), output, seconds))
    return min(plans, key=lambda plan: plan.cost)


def propagate(equation: str, placements: Sequence, mesh: Mesh) -> tuple:
    """Decide how to run an operation on tensors that are placed on a mesh.

    Args:
        equation: Such as "ij,jk->ik", or "relu: ij->ij, i=64". See Equation.parse.
        placements: For each input, one placement for each axis of the mesh. With one axis, a placement will do.
        mesh: A Mesh, or the sizes of its axes.

    Returns:
        The placement of the result, and the list of collectives. With one axis, the placement is not a tuple.
    """
    plan = plan_for(Equation.parse(equation), placements, Mesh.of(mesh))
    return plan.output if len(plan.output) > 1 else plan.output[0], plan.collectives


def all_to_all(shard: Tensor, before: Shard, after: Shard, group: ProcessGroup | None = None) -> Tensor:
    """Turn shards of one dimension into shards of another one."""
    size = dist.get_world_size(group)
    pieces = torch.stack([local_part(shard, after, index, size) for index in range(size)])
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)  # received[r] is the piece of rank r
    return whole_from(list(received), before)


@torch.no_grad()
def redistribute(shard: Tensor, before: Placement, after: Placement, group: ProcessGroup | None = None) -> Tensor:
    """Change the placement of a tensor over the ranks of a group.

    Raises:
        ValueError: if the ranks cannot get equal shards, or no operation makes this change.

    Communication: what rounds_and_bytes() says.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if before == after:
        return shard
    operation = operation_for(before, after)
    if operation is None:
        raise ValueError(f"no single operation turns {before} into {after}")
    if operation in ("slice", "keep_one"):
        return local_part(shard, after, rank, size)
    if operation == "all_reduce":
        total = shard.clone()
        ring_all_reduce(total, group)
        return total
    if operation == "all_gather":
        gathered = ring_all_gather(shard.flatten(), group).view(size, *shard.shape)
        return whole_from(list(gathered), before)
    if operation == "all_to_all":
        return all_to_all(shard, before, after, group)
    pieces = torch.stack([local_part(shard, after, index, size) for index in range(size)])
    return ring_reduce_scatter(pieces, group).view(pieces.shape[1:])


def make_mesh_group(mesh: Mesh) -> MeshGroup:
    """Create the process groups of a mesh over all ranks. Every rank must call this."""
    mesh, rank, groups = Mesh.of(mesh), dist.get_rank(), []
    for axis in range(len(mesh.sizes)):
        created = [(ranks, dist.new_group(ranks)) for ranks in ranks_along(mesh.sizes, axis)]
        groups += [group for ranks, group in created if rank in ranks]
    return MeshGroup(mesh, tuple(groups))


def compute(equation: Equation, tensors: Sequence[Tensor]) -> Tensor:
    """Run an operation on local tensors."""
    # A lambda, because local_shape is defined in 17.9.
    return partitioning.compute(equation, tensors, lambda *arguments: local_shape(*arguments))


@torch.no_grad()
def execute(equation: str, shards: Sequence[Tensor], placements: Sequence, mesh_group=None) -> Tensor:
    """Run an operation on tensors that are placed on a mesh.

    Args:
        equation: As for propagate().
        shards: What this rank holds of each input.
        placements: As for propagate(). The placement of the result is the one that propagate() returns.
        mesh_group: A MeshGroup. With one axis, a process group, or None for all ranks.

    Raises:
        ValueError: if the ranks cannot hold equal shards.

    Communication: the collectives that propagate() returns.
    """
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    shards = list(shards)
    for step in plan_for(parsed, placements, mesh_group.mesh).steps:
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)


def ranks_along(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    """Return the ranks of each process group along one axis of a mesh."""
    grid = torch.arange(math.prod(sizes)).view(sizes)
    return grid.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()


def may_change(placements: Placements, axis: int, after: Placement) -> bool:
    """Return whether one axis may change while all others stay, because no later one shards the same dimension."""
    touched = [each for each in (placements[axis], after) if isinstance(each, Shard)]
    return not any(later in touched for later in placements[axis + 1 :])


def reshape_rules(equation: Equation) -> list[Rule]:
    """Return the rules of a reshape: everything is replicated, or sharded along a letter that begins a dimension."""
    ((term,), output) = equation.inputs, equation.output
    rules = [Rule((Replicate(),), Replicate())]
    for letter in equation.letters:
        before, after = dim_of(letter, term), dim_of(letter, output)
        if before is not None and after is not None:
            rules.append(Rule((Shard(before),), Shard(after)))
    return rules


def local_shape(equation: Equation, shape: Sequence[int]) -> list[int]:
    """Return the shape of a reshape's result on this rank."""
    lengths = dict(equation.lengths)
    for letters, length in zip(equation.inputs[0], shape, strict=True):
        lengths[letters[0]] = length // math.prod(lengths[each] for each in letters[1:])
    return [math.prod(lengths[each] for each in letters) for letters in equation.output]
