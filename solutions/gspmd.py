# Built by `make notebooks` from source/17_gspmd/lab.py: edit that, not this.
"""A partitioner: it decides how ranks run one operation on tensors that are placed on a mesh, and runs it.

For each axis of the mesh, there are rules: placements of the inputs for which no communication is needed. The
partitioner finds the cheapest way to bring the inputs into the placements of some rule, and takes the cheapest rule.

Source: Xu et al. 2021, "GSPMD", arXiv 2105.04663; torch.distributed.tensor (DTensor), which also chooses among rules.

N is the number of ranks along an axis, S the bytes of the tensor that these ranks hold together.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.placements import (
    ADD,
    EINSUM,
    LINEAR,
    MAX,
    RESHAPE,
    Equation,
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    Term,
    as_placements,
    dim_of,
)
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


def operation_for(before: Placement, after: Placement) -> str | None:
    """Return the operation that changes one placement into another, or None if there is none."""
    if before == after:
        return None
    operations = {
        (Shard, Replicate): "all_gather",
        (Partial, Replicate): "all_reduce",
        (Partial, Shard): "reduce_scatter",
        (Shard, Shard): "all_to_all",
        (Replicate, Shard): "slice",
        (Replicate, Partial): "keep_one",
    }
    return operations.get((type(before), type(after)))


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


ELEMENT_BYTES = 4  # The costs are those of float32.
# The length of a letter, per rank of the mesh, if the equation does not state it.
UNSTATED_LENGTH = 1024


def axis_rules(equation: Equation) -> list[Rule]:
    """Return all rules of an operation along one axis of the mesh."""
    of_shards = reshape_rules if equation.operation == RESHAPE else shard_rules
    return of_shards(equation) + partial_rules(equation)


@dataclass(frozen=True)
class Step:
    """Changes the placement of one operand along one axis of the mesh."""

    operand: int
    axis: int
    before: Placement
    after: Placement
    buffer_bytes: int  # of the tensor that the ranks along this axis hold together

    def __str__(self) -> str:
        return f"{self.operation} of input {self.operand} along axis {self.axis}"

    @property
    def operation(self) -> str:
        return operation_for(self.before, self.after)

    @property
    def is_collective(self) -> bool:
        return self.operation not in ("slice", "keep_one")

    def seconds(self, mesh: Mesh) -> float:
        """Return α · rounds + β · bytes."""
        link, size = mesh.links[self.axis], mesh.sizes[self.axis]
        rounds, sent_bytes = rounds_and_bytes(self.operation, self.buffer_bytes, size)
        return link.alpha_s * rounds + link.beta_s_per_byte * sent_bytes


class Layouts:
    """The placements that the tensors of an equation can have on a mesh.

    A partitioner decides before any tensor exists. So it knows the lengths that the equation states. About other
    letters, it only knows that the shards of the inputs divide them.
    """

    def __init__(self, equation: Equation, placements: Sequence, mesh: Mesh):
        self.equation, self.mesh = equation, mesh
        pairs = zip(placements, equation.inputs, strict=True)
        self.starts = [as_placements(each, len(term)) for each, term in pairs]
        unstated = UNSTATED_LENGTH * mesh.ranks
        self.lengths = {each: equation.lengths.get(each, unstated) for each in equation.letters}
        self.known_divisors = {each: self.known_divisor(each) for each in equation.letters}
        for term, start in zip(equation.inputs, self.starts, strict=True):
            for dim, letters in enumerate(term):
                shards = mesh.shards(start, dim)
                if set(letters) <= set(equation.lengths) and self.length(letters) % shards:
                    raise ValueError(
                        f"{letters} = {self.length(letters)} cannot be divided equally "
                        f"into {shards} shards: {start} on a mesh of {mesh.sizes}"
                    )

    def known_divisor(self, letter: str) -> int:
        """Return a number that certainly divides the length of a letter."""
        if letter in self.equation.lengths:
            return self.equation.lengths[letter]
        pairs = zip(self.equation.inputs, self.starts, strict=True)
        shards = [self.mesh.shards(start, dim_of(letter, term)) for term, start in pairs]
        return math.lcm(*shards)

    def length(self, letters: str) -> int:
        return math.prod(self.lengths[letter] for letter in letters)

    def fits(self, term: Term, placements: Placements) -> bool:
        """Return whether every rank certainly gets an equal shard of a tensor."""
        for dim, letters in enumerate(term):
            divisor = math.prod(self.known_divisors[letter] for letter in letters)
            if divisor % self.mesh.shards(placements, dim):
                return False
        return True

    def held_bytes(self, term: Term, placements: Placements) -> int:
        """Return the bytes that one rank holds of a tensor."""
        shards = math.prod(self.mesh.shards(placements, dim) for dim in range(len(term)))
        return ELEMENT_BYTES * self.length("".join(term)) // shards

    def rules(self) -> Iterator[tuple[list[Placements], Placements]]:
        """Yield the placements of inputs and output for each combination of rules, one rule for each axis."""
        equation, axes = self.equation, len(self.mesh.sizes)
        for rules in itertools.product(axis_rules(equation), repeat=axes):
            inputs = list(zip(*(rule.inputs for rule in rules), strict=True))
            output = tuple(rule.output for rule in rules)
            tensors = zip((*equation.inputs, equation.output), (*inputs, output), strict=True)
            # In a reshape, a rank's shard of a dimension consists of whole blocks of its first letter.
            if all(self.fits([letters[0] for letters in term], each) for term, each in tensors):
                yield inputs, output

    def seconds_to_finish(self, output: Placements) -> float:
        """Return how long it takes to reduce-scatter a Partial result along each axis on which it is Partial."""
        held = self.held_bytes(self.equation.output, output)
        return sum(
            Step(0, axis, placement, Shard(0), held).seconds(self.mesh)
            for axis, placement in enumerate(output)
            if isinstance(placement, Partial)
        )

    def steps_from(self, operand: int, placements: Placements) -> Iterator[Step]:
        """Yield every single step that an operand with these placements can make."""
        term = self.equation.inputs[operand]
        for axis, before in enumerate(placements):
            gathered = (*placements[:axis], Replicate(), *placements[axis + 1 :])
            for after in (Replicate(), Partial(), *map(Shard, range(len(term)))):
                step = Step(operand, axis, before, after, self.held_bytes(term, gathered))
                if step.operation is None or not self.fits(term, changed(placements, step)):
                    continue
                if len(placements) == 1 or may_change(placements, axis, after):
                    yield step

    def routes(self, operand: int) -> dict[Placements, tuple[Step, ...]]:
        """Return the cheapest steps to all placements that an operand can get. (This is Dijkstra's algorithm.)"""
        found, order = {}, itertools.count()  # of two equal routes, the queue returns the older one
        queue = [(0.0, 0, next(order), self.starts[operand], ())]
        while queue:
            _, _, _, placements, steps = heapq.heappop(queue)
            if placements in found:
                continue
            found[placements] = steps
            for step in self.steps_from(operand, placements):
                longer = (*steps, step)
                seconds = rounded(sum(each.seconds(self.mesh) for each in longer))
                heapq.heappush(queue, (seconds, len(longer), next(order), changed(placements, step), longer))
        return found


def rounded(seconds: float) -> float:
    """Keep ten digits, so that equal costs compare as equal, in whatever order they were added up."""
    return float(f"{seconds:.10g}")


def changed(placements: Placements, step: Step) -> Placements:
    """Return the placements of a tensor after a step."""
    return (*placements[: step.axis], step.after, *placements[step.axis + 1 :])


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


@dataclass(frozen=True)
class MeshGroup:
    """A mesh, and for each of its axes the process group of this rank and the others along this axis."""

    mesh: Mesh
    groups: tuple[ProcessGroup | None, ...]

    @classmethod
    def of(cls, mesh_group) -> "MeshGroup":
        """Make a MeshGroup from a MeshGroup, a DeviceMesh, a group for each axis, or one group (None: all ranks)."""
        if isinstance(mesh_group, cls):
            return mesh_group
        if hasattr(mesh_group, "get_all_groups"):
            return cls(Mesh.of(mesh_group), tuple(mesh_group.get_all_groups()))
        if isinstance(mesh_group, (tuple, list)):
            sizes = tuple(dist.get_world_size(group) for group in mesh_group)
            return cls(Mesh(sizes), tuple(mesh_group))
        return cls(Mesh((dist.get_world_size(mesh_group),)), (mesh_group,))


def make_mesh_group(mesh: Mesh) -> MeshGroup:
    """Create the process groups of a mesh over all ranks. Every rank must call this."""
    mesh, rank, groups = Mesh.of(mesh), dist.get_rank(), []
    for axis in range(len(mesh.sizes)):
        created = [(ranks, dist.new_group(ranks)) for ranks in ranks_along(mesh.sizes, axis)]
        groups += [group for ranks, group in created if rank in ranks]
    return MeshGroup(mesh, tuple(groups))


FUNCTIONS = {
    "neg": torch.neg,
    "relu": torch.relu,
    "exp": torch.exp,
    "square": torch.square,
    "plus_one": lambda tensor: tensor + 1,
}


def aligned(tensor: Tensor, term: Term, output: Term) -> Tensor:
    """Give a tensor the dimensions of the output, in the same order, for broadcasting."""
    permuted = tensor.permute([term.index(letter) for letter in output if letter in term])
    return permuted[tuple(slice(None) if letter in term else None for letter in output)]


def compute(equation: Equation, tensors: Sequence[Tensor]) -> Tensor:
    """Run an operation on local tensors. Their lengths need not be those of the whole tensors."""
    inputs, output, operation = equation.inputs, equation.output, equation.operation
    if operation == EINSUM:
        terms = ",".join("".join(term) for term in inputs)
        return torch.einsum(f"{terms}->{''.join(output)}", *tensors)
    if operation == ADD:
        pairs = zip(tensors, inputs, strict=True)
        return sum(aligned(tensor, term, output) for tensor, term in pairs)
    (tensor,), (term,) = tensors, inputs
    if operation == RESHAPE:
        return tensor.reshape(local_shape(equation, tensor.shape))
    if operation == MAX:
        dropped = [dim for dim, letter in enumerate(term) if letter not in output]
        tensor = tensor.amax(dropped) if dropped else tensor
        return aligned(tensor, tuple(letter for letter in term if letter in output), output)
    return aligned(FUNCTIONS[operation](tensor), term, output)


def check_lengths(equation: Equation, shards: Sequence[Tensor], placements: Sequence, mesh: Mesh) -> None:
    """Check that a letter has the same length in all inputs, and the one that the equation states.

    Raises:
        ValueError: if not, and also if the ranks hold shards of unequal size.
    """
    lengths = dict(equation.lengths)
    for operand, (shard, term) in enumerate(zip(shards, equation.inputs, strict=True)):
        starts = as_placements(placements[operand], len(term))
        for dim, letters in enumerate(term):
            length = shard.shape[dim] * mesh.shards(starts, dim)
            stated = math.prod(lengths.setdefault(each, length) for each in letters)
            if length != stated:
                raise ValueError(
                    f"dimension {dim} of input {operand} ({letters}) has {length} elements, but "
                    f"{letters} = {stated} elsewhere. Does every rank hold an equal shard?"
                )


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
