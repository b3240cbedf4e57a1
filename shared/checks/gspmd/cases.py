"""The operations that the checks of chapter 17 try, and how they describe them."""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import PieceMissing
from shared.checks.gspmd.trying import cut, every_placement, result_of
from shared.placements import Equation, Link, Mesh, Placement, Placements

MATMUL = "ij,jk->ik"
EINSUMS = (
    MATMUL,
    "ij->i",
    "ij->",
    "ij->ji",
    "ij,ij->ij",
    "i,j->ij",
    "bij,bjk->bik",
    "ij,kj->ki",
    "i,i->",
    "ij,jk,kl->il",
)
OTHERS = ("add: ij,ij->ij", "add: ij,j->ij", "add: i,ij,j->ji", "neg: ij->ij", "relu: ij->ij", "exp: ij->ji")
OTHERS += ("square: ij->ij", "plus_one: ijk->ijk", "max: ij->i", "max: ijk->kj")
EQUATIONS = EINSUMS + OTHERS
TIMES_AS_LONG = 8  # Drawn lengths are up to this many times as long as usual.


@dataclass(frozen=True)
class Case:
    """An operation on inputs with given placements."""

    equation: str
    placements: tuple[Placements, ...]
    mesh: Mesh

    @property
    def parsed(self) -> Equation:
        return Equation.parse(self.equation)

    def asked(self, bare: bool = False) -> tuple:
        """Return the arguments of propagate().

        Args:
            bare: Whether a placement on a mesh with one axis is no tuple.
        """
        return self.equation, [each[0] for each in self.placements] if bare else list(self.placements), self.mesh

    def __str__(self) -> str:
        inputs = " and ".join(describe(each) for each in self.placements)
        return f"{self.equation} with {inputs} on {describe_mesh(self.mesh)}"


def describe(placements: Placement | Placements) -> str:
    """Describe placements as students write them."""
    if isinstance(placements, tuple):
        inside = ", ".join(map(describe, placements))
        return inside if len(placements) == 1 else f"({inside})"
    return repr(placements)


def describe_mesh(mesh: Mesh) -> str:
    sizes = " × ".join(map(str, mesh.sizes))
    return f"{sizes} rank{'' if mesh.ranks == 1 else 's'}"


def describe_bytes(*counts: float) -> list[str]:
    """Write different numbers of bytes, with as many decimals as tell them apart."""
    for decimals in range(9):
        texts = [f"{count:,.{decimals}f}" for count in counts]
        if len(set(texts)) == len(set(counts)):
            return texts
    return list(map(str, counts))


def beside(piece: Callable, name: str) -> Callable:
    """Return another function that is defined beside the student's piece.

    Raises:
        PieceMissing: If it is not defined.
    """
    namespace = inspect.unwrap(piece).__globals__  # of the function itself, if torch.no_grad() decorates it
    if name not in namespace:
        raise PieceMissing(f"{name} is not defined beside {piece.__name__}")
    return namespace[name]


# -- drawing


def lengths_for(
    equation: Equation, placements: Sequence[Placements], mesh: Mesh, draw: random.Random, most: int = 3, unit: int = 1
) -> dict[str, int]:
    """Draw lengths that the shards of the inputs divide. Other ranks or dimensions may not divide them."""
    lengths = {}
    for letter in equation.letters:
        every = zip(equation.inputs, placements, strict=True)
        shards = [mesh.shards(each, term.index(letter)) for term, each in every if letter in term]
        lengths[letter] = math.lcm(unit, *shards) * draw.randint(1, most)
    return lengths


def stated(equation: str, lengths: dict[str, int]) -> str:
    known = Equation.parse(equation).lengths
    return equation + "".join(f", {each}={length}" for each, length in lengths.items() if each not in known)


def draw_case(
    attempt: Attempt, equation: str, mesh: Mesh, states: float = 0.5, most: int = 3, unit: int = 1
) -> tuple[Case, dict]:
    """Draw placements and lengths for an equation. Returns the case, and the lengths of its letters.

    Args:
        attempt: The attempt that draws.
        equation: The equation.
        mesh: The mesh.
        states: How often the equation states the lengths.
        most: Lengths are up to this many times as long as the shards need. If sizes are drawn, the
            factor is at least this one.
        unit: All lengths are multiples of this.
    """
    draw, parsed = attempt.random, Equation.parse(equation)
    placements = tuple(tuple(draw.choice(every_placement(len(term))) for _ in mesh.sizes) for term in parsed.inputs)
    most = attempt.sizes.pick(most, range(most, TIMES_AS_LONG * most))
    lengths = lengths_for(parsed, placements, mesh, draw, most, unit) | parsed.lengths
    text = stated(equation, lengths) if draw.random() < states else equation
    return Case(text, placements, mesh), lengths


def draw_links(attempt: Attempt, axes: int) -> tuple[Link, ...]:
    draw = attempt.random
    return tuple(Link(10 ** draw.uniform(-7, -3), 10 ** draw.uniform(-12, -8)) for _ in range(axes))


# -- tensors


@dataclass(frozen=True)
class Tensors:
    """The inputs of a case, what each rank holds of them, and the result of one process."""

    wholes: list[np.ndarray]
    parts: list[list[np.ndarray]]  # of each operand, by rank
    expected: np.ndarray

    def of_rank(self, rank: int) -> list[torch.Tensor]:
        return [torch.tensor(parts[rank]) for parts in self.parts]


def tensors_for(attempt: Attempt, case: Case, lengths: dict[str, int]) -> Tensors:
    """Draw the inputs of a case, in float64, and compute the result in one process."""
    draw, equation = np.random.default_rng(attempt.draw_seed()), case.parsed
    shapes = [[math.prod(map(lengths.__getitem__, letters)) for letters in term] for term in equation.inputs]
    wholes = [draw.standard_normal(shape) for shape in shapes]
    parts = [cut(whole, each, case.mesh, draw) for whole, each in zip(wholes, case.placements, strict=True)]
    return Tensors(wholes, parts, result_of(equation, wholes))


def on_one_axis(*placements: Placement) -> tuple[Placements, ...]:
    return tuple((each,) for each in placements)
