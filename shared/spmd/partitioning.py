"""What a partitioner needs around its decisions: routes between placements, local operations, and a mesh's groups.

Students of chapter 17 write the rules, the costs and the choice. `Layouts` and `Step` get them from subclasses.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.placements import (
    ADD,
    EINSUM,
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

ELEMENT_BYTES = 4  # The costs are those of float32.
# The length of a letter, per rank of the mesh, if the equation does not state it.
UNSTATED_LENGTH = 1024


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


@dataclass(frozen=True)
class Step:
    """Changes the placement of one operand along one axis of the mesh. Subclasses say how many seconds it takes."""

    operand: int
    axis: int
    before: Placement
    after: Placement
    buffer_bytes: int  # of the tensor that the ranks along this axis hold together

    def __str__(self) -> str:
        return f"{self.operation} of input {self.operand} along axis {self.axis}"

    @property
    def operation(self) -> str | None:
        return operation_for(self.before, self.after)

    @property
    def is_collective(self) -> bool:
        return self.operation not in ("slice", "keep_one")

    def seconds(self, mesh: Mesh) -> float:
        raise NotImplementedError


class Layouts:
    """The placements that the tensors of an equation can have on a mesh, the rules, and the routes there.

    Subclasses give it the rules, the costs and, for meshes of several axes, `may_change`. A partitioner decides before
    any tensor exists. So it knows the lengths that the equation states. About other letters, it only knows that the
    shards of the inputs divide them.
    """

    step_class: type["Step"]

    def axis_rules(self) -> Sequence:
        """Return all rules of the operation along one axis, each with `inputs` and `output`."""
        raise NotImplementedError

    def may_change(self, placements: Placements, axis: int, after: Placement) -> bool:
        """Return whether one axis may change while all others stay."""
        raise NotImplementedError

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
        dims = [(start, dim_of(letter, term)) for term, start in pairs]
        return math.lcm(*(self.mesh.shards(start, dim) for start, dim in dims if dim is not None))

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
        for rules in itertools.product(self.axis_rules(), repeat=axes):
            inputs = list(zip(*(rule.inputs for rule in rules), strict=True))
            output = tuple(rule.output for rule in rules)
            tensors = zip((*equation.inputs, equation.output), (*inputs, output), strict=True)
            # In a reshape, a rank's shard of a dimension consists of whole blocks of its first letter.
            if all(self.fits(tuple(letters[0] for letters in term), each) for term, each in tensors):
                yield inputs, output

    def seconds_to_finish(self, output: Placements) -> float:
        """Return how long it takes to reduce-scatter a Partial result along each axis on which it is Partial."""
        held = self.held_bytes(self.equation.output, output)
        return sum(
            self.step_class(0, axis, placement, Shard(0), held).seconds(self.mesh)
            for axis, placement in enumerate(output)
            if isinstance(placement, Partial)
        )

    def steps_from(self, operand: int, placements: Placements) -> Iterator[Step]:
        """Yield every single step that an operand with these placements can make."""
        term = self.equation.inputs[operand]
        for axis, before in enumerate(placements):
            gathered = (*placements[:axis], Replicate(), *placements[axis + 1 :])
            for after in (Replicate(), Partial(), *map(Shard, range(len(term)))):
                step = self.step_class(operand, axis, before, after, self.held_bytes(term, gathered))
                if step.operation is None or not self.fits(term, changed(placements, step)):
                    continue
                if len(placements) == 1 or self.may_change(placements, axis, after):
                    yield step

    def routes(self, operand: int) -> dict[Placements, tuple[Step, ...]]:
        """Return the cheapest steps to all placements that an operand can get. (This is Dijkstra's algorithm.)"""
        found, order = {}, itertools.count()  # of two equal routes, the queue returns the older one
        queue: list[tuple[float, int, int, Placements, tuple[Step, ...]]] = []
        queue.append((0.0, 0, next(order), self.starts[operand], ()))
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


# -- running an operation


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


def compute(equation: Equation, tensors: Sequence[Tensor], local_shape: Callable | None = None) -> Tensor:
    """Run an operation on local tensors. Their lengths need not be those of the whole tensors.

    Args:
        local_shape: For a reshape, returns the shape of the result on this rank.
    """
    inputs, output, operation = equation.inputs, equation.output, equation.operation
    if operation == EINSUM:
        terms = ",".join("".join(term) for term in inputs)
        return torch.einsum(f"{terms}->{''.join(output)}", *tensors)
    if operation == ADD:
        pairs = zip(tensors, inputs, strict=True)
        return reduce(torch.add, (aligned(tensor, term, output) for tensor, term in pairs))
    (tensor,), (term,) = tensors, inputs
    if operation == RESHAPE:
        assert local_shape is not None, "a reshape needs the shape of its result"
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
