"""Find out by trying which placements work, and how fast the fastest way is.

Nothing here knows a rule of partitioning. A rule is right if the ranks' results make up the result of one process, and
a step is possible if it brings the parts of a tensor from one placement to another. The fastest way is the best of all.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shared import formulas
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
)

_FUNCTIONS = {
    "neg": np.negative,
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "square": np.square,
    "plus_one": lambda x: x + 1,
}
_TRIED_RANKS = 2  # The rules along an axis do not depend on the number of its ranks.
_TRIED_LENGTHS = (4, 6, 8, 10, 12)  # of letters whose length does not matter: after halving them, none is 1
_ELEMENT_BYTES, _UNSTATED = 4, 1024  # as in the lab


# -- tensors of one process


def result_of(equation: Equation, tensors: Sequence[np.ndarray], shape: Sequence[int] | None = None) -> np.ndarray:
    """Compute an operation in one process.

    Args:
        equation: The operation.
        tensors: Its inputs.
        shape: The shape of the result of a reshape, if it differs from what the equation states.
    """
    terms, output = ["".join(term) for term in equation.inputs], "".join(equation.output)
    if equation.operation == RESHAPE:
        return tensors[0].reshape(
            shape or [math.prod(map(equation.lengths.__getitem__, each)) for each in equation.output]
        )
    if equation.operation == EINSUM:
        return np.einsum(f"{','.join(terms)}->{output}", *tensors)
    if equation.operation == ADD:
        lengths = {
            each: n for term, x in zip(terms, tensors, strict=True) for each, n in zip(term, x.shape, strict=True)
        }
        ones = [np.ones([lengths[each] for each in output if each not in term]) for term in terms]
        rests = ["".join(each for each in output if each not in term) for term in terms]
        every = zip(terms, rests, tensors, ones, strict=True)
        return np.asarray(sum(np.einsum(f"{term},{rest}->{output}", x, one) for term, rest, x, one in every))
    if equation.operation == MAX:
        kept = "".join(each for each in terms[0] if each in output)
        dropped = tuple(dim for dim, each in enumerate(terms[0]) if each not in output)
        return np.einsum(f"{kept}->{output}", tensors[0].max(dropped))
    return _FUNCTIONS[equation.operation](np.einsum(f"{terms[0]}->{output}", tensors[0]))


def cut(whole: np.ndarray, placements: Placements, mesh: Mesh, draw: np.random.Generator) -> list[np.ndarray]:
    """Return what each rank of a mesh holds. The terms of a Partial are drawn."""
    return _cut(whole, list(zip(placements, mesh.sizes, strict=True)), draw)


def _cut(tensor: np.ndarray, axes: list[tuple[Placement, int]], draw: np.random.Generator) -> list[np.ndarray]:
    if not axes:
        return [tensor]
    (placement, size), *later = axes
    if isinstance(placement, Replicate):
        return _cut(tensor, later, draw) * size  # the same terms, if a later axis is Partial
    return [part for each in _cut_once(tensor, placement, size, draw) for part in _cut(each, later, draw)]


def _cut_once(tensor: np.ndarray, placement: Placement, size: int, draw: np.random.Generator) -> list[np.ndarray]:
    if isinstance(placement, Shard):
        return np.split(tensor, size, placement.dim)
    if isinstance(placement, Replicate):
        return [tensor] * size
    terms = [draw.standard_normal(tensor.shape) for _ in range(size - 1)]
    return [*terms, tensor - sum(terms)]


def join(parts: Sequence[np.ndarray], placements: Placements, mesh: Mesh) -> np.ndarray:
    """Return the whole tensor of which each rank of a mesh holds a part.

    Raises:
        ValueError: If the parts do not fit together, or if replicas differ.
    """
    for size, placement in reversed(list(zip(mesh.sizes, placements, strict=True))):
        parts = [_join_once(parts[first : first + size], placement) for first in range(0, len(parts), size)]
    return parts[0]


def _join_once(parts: Sequence[np.ndarray], placement: Placement) -> np.ndarray:
    if isinstance(placement, Shard):
        return np.concatenate(parts, placement.dim)
    if isinstance(placement, Partial):
        return np.asarray(sum(parts))
    if not all(part.shape == parts[0].shape and np.allclose(part, parts[0]) for part in parts):
        raise ValueError("ranks that should hold the same tensor hold different ones")
    return parts[0]


# -- rules along one axis


def every_placement(dims: int) -> list[Placement]:
    return [Replicate(), Partial(), *map(Shard, range(dims))]


@functools.cache
def rules_of(text: str) -> frozenset[tuple[tuple[Placement, ...], Placement]]:
    """Return all placements of inputs and result with which an operation works without any communication."""
    equation = Equation.parse(text)
    lengths = dict(zip(equation.letters, itertools.cycle(_TRIED_LENGTHS), strict=False)) | equation.lengths
    draw = np.random.default_rng(1)
    shapes = [[math.prod(map(lengths.__getitem__, letters)) for letters in term] for term in equation.inputs]
    wholes = [draw.standard_normal(shape) for shape in shapes]
    out_shape = [math.prod(map(lengths.__getitem__, letters)) for letters in equation.output]
    mesh, expected = Mesh((_TRIED_RANKS,)), result_of(equation, wholes, out_shape)
    found = set()
    for inputs in itertools.product(*(every_placement(len(term)) for term in equation.inputs)):
        parts = [cut(whole, (each,), mesh, draw) for whole, each in zip(wholes, inputs, strict=True)]
        for output in every_placement(len(equation.output)):
            if _works(equation, parts, output, expected, mesh):
                found.add((inputs, output))
    return frozenset(found)


def _works(equation: Equation, parts: list, output: Placement, expected: np.ndarray, mesh: Mesh) -> bool:
    shape = list(expected.shape)
    if isinstance(output, Shard):
        shape[output.dim] //= _TRIED_RANKS
    try:
        results = [result_of(equation, tensors, shape) for tensors in zip(*parts, strict=True)]
        whole = join(results, (output,), mesh)
    except ValueError:
        return False
    return whole.shape == expected.shape and np.allclose(whole, expected)


# -- steps on a mesh


@functools.cache
def changes_of(dims: int, sizes: tuple[int, ...], placements: Placements) -> tuple[tuple[int, Placement], ...]:
    """Return each (axis, placement) that a tensor's placements can change to, while all other axes stay."""
    mesh, draw = Mesh(sizes), np.random.default_rng(2)
    whole = draw.standard_normal([mesh.ranks] * dims)
    parts = cut(whole, placements, mesh, draw)
    return tuple(
        (axis, after)
        for axis, before in enumerate(placements)
        for after in every_placement(dims)
        if after != before and not (isinstance(before, Shard) and isinstance(after, Partial))
        if _changes(whole, parts, placements, axis, after, mesh)
    )


def _changes(whole, parts: list, placements: Placements, axis: int, after: Placement, mesh: Mesh) -> bool:
    """Change the parts along one axis, as ranks would, and look whether they make up the same tensor again."""
    grid = np.arange(mesh.ranks).reshape(mesh.sizes)
    changed = list(parts)
    for ranks in np.moveaxis(grid, axis, -1).reshape(-1, mesh.sizes[axis]):
        together = _join_once([parts[rank] for rank in ranks], placements[axis])
        for rank, part in zip(ranks, _cut_once(together, after, len(ranks), np.random.default_rng(3)), strict=True):
            changed[rank] = part
    try:
        again = join(changed, (*placements[:axis], after, *placements[axis + 1 :]), mesh)
    except ValueError:
        return False
    return np.allclose(again, whole)


def operation_of(before: Placement, after: Placement) -> str | None:
    """Name the operation that changes a placement."""
    kinds = type(before), type(after)
    if before == after or kinds == (Shard, Partial):
        return None
    if isinstance(before, Replicate):
        return "slice" if isinstance(after, Shard) else "keep_one"
    if isinstance(before, Partial):
        return "reduce_scatter" if isinstance(after, Shard) else "all_reduce"
    return "all_to_all" if isinstance(after, Shard) else "all_gather"


def rounds_of(operation: str, size: int) -> int:
    factors = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
    return factors.get(operation, 0) * (size - 1)


def sent_bytes_of(operation: str, buffer_bytes: float, size: int) -> float:
    """Return what each rank sends, by the formulas of chapter 01."""
    match operation:
        case "all_gather":
            return formulas.all_gather_sent_bytes(buffer_bytes, size)
        case "reduce_scatter":
            return formulas.reduce_scatter_sent_bytes(buffer_bytes, size)
        case "all_reduce":
            return formulas.all_reduce_sent_bytes(buffer_bytes, size)
        case "all_to_all":
            return formulas.ring_fraction(size) * buffer_bytes / size
    return 0.0


def seconds_of(operation: str, buffer_bytes: float, mesh: Mesh, axis: int) -> float:
    size, link = mesh.sizes[axis], mesh.links[axis]
    sent_bytes = sent_bytes_of(operation, buffer_bytes, size)
    return link.alpha_s * rounds_of(operation, size) + link.beta_s_per_byte * sent_bytes


# -- the fastest way


@dataclass(frozen=True)
class Way:
    """The result's placements, and how long the collectives take."""

    output: Placements
    seconds: float  # without the reduction of a Partial result
    later_s: float  # the reduction of a Partial result
    collectives: int
    steps: int

    @property
    def total_s(self) -> float:
        return self.seconds + self.later_s


class Ways:
    """All ways to run an operation whose inputs have given placements."""

    def __init__(self, equation: Equation, placements: Sequence[Placements], mesh: Mesh):
        self.equation, self.placements, self.mesh = equation, placements, mesh
        unstated = _UNSTATED * mesh.ranks
        self.lengths = {each: equation.lengths.get(each, unstated) for each in equation.letters}
        self.divisors = {each: self._divisor(each) for each in equation.letters}

    def best(self) -> list[Way]:
        """Return all ways that are equally good: the fewest seconds, then collectives, then steps."""
        ways = list(self.every())
        fewest = min(_order(way) for way in ways)
        return [way for way in ways if _order(way) == fewest]

    def every(self) -> Iterator[Way]:
        """Yield the fastest way to each combination of rules."""
        operands = range(len(self.placements))
        reached = [self._reached(operand) for operand in operands]
        text = _text_of(self.equation)
        for rules in itertools.product(sorted(rules_of(text), key=str), repeat=len(self.mesh.sizes)):
            inputs = [tuple(rule[0][operand] for rule in rules) for operand in operands]
            output = tuple(rule[1] for rule in rules)
            tensors = zip((*self.equation.inputs, self.equation.output), (*inputs, output), strict=True)
            if not all(self._fits([letters[0] for letters in term], each) for term, each in tensors):
                continue  # the shards of a dimension with several letters consist of blocks of the first one
            costs = [reached[operand].get(inputs[operand]) for operand in operands]
            if None not in costs:
                seconds, collectives, steps = (sum(each) for each in zip(*costs, strict=True))
                yield Way(output, seconds, self._later_s(output), collectives, steps)

    def later_s(self, output: Placements) -> float:
        """Return how long a reduce-scatter of the result takes along each axis on which it is Partial."""
        return self._later_s(output)

    def _divisor(self, letter: str) -> int:
        """Return the length of a letter, or a number that certainly divides it."""
        if letter in self.equation.lengths:
            return self.equation.lengths[letter]
        every = zip(self.equation.inputs, self.placements, strict=True)
        return math.lcm(*(self._shards(placements, term.index(letter)) for term, placements in every if letter in term))

    def _shards(self, placements: Placements, dim: int) -> int:
        pairs = zip(placements, self.mesh.sizes, strict=True)
        return math.prod(size for placement, size in pairs if placement == Shard(dim))

    def _fits(self, term, placements: Placements) -> bool:
        """Return whether the ranks certainly get equal shards."""
        divisors = [math.prod(map(self.divisors.__getitem__, letters)) for letters in term]
        return all(divisor % self._shards(placements, dim) == 0 for dim, divisor in enumerate(divisors))

    def _held_bytes(self, term, placements: Placements) -> float:
        shards = math.prod(self._shards(placements, dim) for dim in range(len(term)))
        return _ELEMENT_BYTES * math.prod(self.lengths[each] for letters in term for each in letters) / shards

    def _later_s(self, output: Placements) -> float:
        held = self._held_bytes(self.equation.output, output)
        axes = [axis for axis, each in enumerate(output) if isinstance(each, Partial)]
        return sum(seconds_of("reduce_scatter", held, self.mesh, axis) for axis in axes)

    def _reached(self, operand: int) -> dict[Placements, tuple[float, int, int]]:
        """Return the cost of all placements that an input can get: seconds, collectives and steps.

        All costs are improved until none can be improved any more.
        """
        term, start = self.equation.inputs[operand], self.placements[operand]
        costs, improved = {start: (0.0, 0, 0)}, [start]
        sizes = tuple(max(size, 2) for size in self.mesh.sizes)  # along a single rank, any order of steps would work
        while improved:
            placements = improved.pop()
            seconds, collectives, steps = costs[placements]
            for axis, after in changes_of(len(term), sizes, placements):
                changed = (*placements[:axis], after, *placements[axis + 1 :])
                if not self._fits(term, changed):
                    continue
                gathered = (*placements[:axis], Replicate(), *placements[axis + 1 :])
                operation = operation_of(placements[axis], after)
                assert operation is not None  # changes_of() yields only what an operation can do.
                took_s = seconds_of(operation, self._held_bytes(term, gathered), self.mesh, axis)
                is_collective = operation not in ("slice", "keep_one")
                cost = seconds + took_s, collectives + is_collective, steps + 1
                if changed not in costs or _comparable(*cost) < _comparable(*costs[changed]):
                    costs[changed] = cost
                    improved.append(changed)
        return costs


def _text_of(equation: Equation) -> str:
    """Return an equation as text. Lengths are left out if the rules do not depend on them."""
    terms = [
        "".join(f"({each})" if len(each) > 1 else each for each in term) for term in (*equation.inputs, equation.output)
    ]
    lengths = equation.lengths if equation.operation == RESHAPE else {}
    stated = "".join(f", {letter}={8 if letter in lengths else 0}" for letter in lengths)
    return f"{equation.operation}: {','.join(terms[:-1])}->{terms[-1]}{stated}"


def _order(way: Way) -> tuple[float, int, int]:
    return _comparable(way.total_s, way.collectives, way.steps)


def _comparable(seconds: float, collectives: int, steps: int) -> tuple[float, int, int]:
    """Keep ten digits, so that equal costs compare as equal, in whatever order they were added up."""
    return float(f"{seconds:.10g}"), collectives, steps
