"""The vocabulary of chapter 17: placements of tensors on a mesh of ranks, and the equations of a program.

    mesh = Mesh((2, 4))                            # 8 ranks in two rows
    placements = (Shard(0), Replicate())           # one placement for each axis of the mesh
    equation = Equation.parse("ij,jk->ik, k=12")   # einsum's letters, and the length of a letter

Nothing here decides what to communicate. Students of chapter 17 write the partitioner that does.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

# -- placements


class Placement:
    """How the ranks along one axis of a mesh hold a tensor: Shard(dim), Replicate() or Partial()."""


@dataclass(frozen=True)
class Shard(Placement):
    """Each rank holds an equal shard of dimension `dim`, in the order of the ranks."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Each rank holds the whole tensor."""


@dataclass(frozen=True)
class Partial(Placement):
    """Each rank holds one term of a sum that has not been computed yet. The tensor is the sum over the ranks."""


Placements = tuple[Placement, ...]  # one for each axis of the mesh


def as_placements(placements: Placement | Sequence[Placement], dims: int) -> Placements:
    """Return a tensor's placements as a tuple, in which no dimension is negative, that is, counted from the end.

    Args:
        placements: One for each axis. On a mesh with a single axis, the placement itself will do.
        dims: The number of the tensor's dimensions.

    Raises:
        ValueError: If a dimension does not exist.
    """
    found = (placements,) if isinstance(placements, Placement) else tuple(placements)
    for placement in found:
        if isinstance(placement, Shard) and not -dims <= placement.dim < dims:
            raise ValueError(f"{placement} needs a dimension {placement.dim}, but the tensor has {dims} dimensions")
    return tuple(Shard(each.dim % dims) if isinstance(each, Shard) else each for each in found)


# -- meshes


@dataclass(frozen=True)
class Link:
    """What connects the ranks along one axis of a mesh: sending S bytes takes alpha_s + beta_s_per_byte · S seconds."""

    alpha_s: float = 10e-6
    beta_s_per_byte: float = 1 / 25e9


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks. Rank numbers increase along the last axis first, as in torch's DeviceMesh.

    Attributes:
        sizes: The number of ranks along each axis.
        links: What connects the ranks along each axis. The default is the same link everywhere.
    """

    sizes: tuple[int, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        links = self.links or (Link(),) * len(self.sizes)
        if len(links) != len(self.sizes):
            raise ValueError(f"a mesh of {len(self.sizes)} axes needs as many links, got {len(links)}")
        object.__setattr__(self, "links", tuple(links))

    @classmethod
    def of(cls, mesh) -> "Mesh":
        """Return a mesh for a Mesh, a number of ranks, the sizes of its axes, or a DeviceMesh."""
        if isinstance(mesh, cls):
            return mesh
        sizes = getattr(mesh, "shape", mesh)
        return cls((sizes,) if isinstance(sizes, int) else tuple(sizes))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's index along each axis."""
        found = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    def shards(self, placements: Placements, dim: int) -> int:
        """Return into how many shards a tensor's placements divide one of its dimensions."""
        return math.prod(size for size, each in zip(self.sizes, placements, strict=True) if each == Shard(dim))


# -- equations

EINSUM, ADD, RESHAPE, MAX = "einsum", "add", "reshape", "max"
# Functions of each element. Those in LINEAR satisfy f(x + y) = f(x) + f(y).
ELEMENTWISE = ("neg", "relu", "exp", "square", "plus_one")
LINEAR = (ADD, RESHAPE, "neg")
OPERATIONS = (EINSUM, ADD, RESHAPE, MAX, *ELEMENTWISE)

Term = tuple[str, ...]  # the letters of each dimension of a tensor: ("i", "j"), or ("i", "hd") for a matrix i(hd)
_TERM = re.compile(r"(?:[a-zA-Z]|\([a-zA-Z]+\))*")


@dataclass(frozen=True)
class Equation:
    """One operation of a program.

    Attributes:
        operation: One of OPERATIONS.
        inputs: The letters of each operand.
        output: The letters of the result.
        lengths: The lengths of letters, as far as the equation states them.
    """

    operation: str
    inputs: tuple[Term, ...]
    output: Term
    lengths: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Equation":
        """Read an equation. It can begin with the name of an operation, and end with lengths of letters.

            ij,jk->ik                   an einsum: here, a matrix product
            ij,jk->ik, i=8, j=64        the same, with two lengths
            add: ij,j->ij               a sum. An operand that lacks a letter is broadcast along it
            relu: ij->ij                one of the functions in ELEMENTWISE, for each element
            max: ij->i                  the largest element along j
            reshape: i(hd)->ihd, h=4, d=8   one dimension becomes two, or the other way round

        Raises:
            ValueError: If this is not an equation.
        """
        name, colon, rest = text.replace(" ", "").rpartition(":")
        terms, *stated = re.split(r",(?=[a-zA-Z]=)", rest)
        sides = terms.split("->")
        if len(sides) != 2 or (colon and name not in OPERATIONS):
            raise ValueError(f"{text!r} is not an equation: write 'ij,jk->ik', or for example 'relu: ij->ij'")
        *inputs, output = (_term(term, text) for term in (*sides[0].split(","), sides[1]))
        lengths = {letter: int(length) for letter, _, length in (each.partition("=") for each in stated)}
        if problem := _problem(name or EINSUM, inputs, output, lengths):
            raise ValueError(f"{text!r} is not an equation: {problem}")
        return cls(name or EINSUM, tuple(inputs), output, lengths)

    @property
    def letters(self) -> list[str]:
        """The letters, in the order in which they appear."""
        return list(dict.fromkeys("".join("".join(term) for term in self.inputs)))


def _problem(operation: str, inputs: list[Term], output: Term, lengths: dict[str, int]) -> str:
    """Return what is wrong with an equation, or ""."""
    terms = ["".join(term) for term in (*inputs, output)]
    groups = [letters for term in (*inputs, output) for letters in term if len(letters) > 1]
    if any(len(set(term)) < len(term) for term in terms):
        return "a tensor has the same letter twice"
    if not set(terms[-1]) <= set("".join(terms[:-1])):
        return "the result has a letter that no operand has"
    if operation not in (EINSUM, ADD) and len(inputs) != 1:
        return f"{operation} takes one operand"
    if operation not in (EINSUM, MAX) and not set("".join(terms[:-1])) <= set(terms[-1]):
        return "only an einsum and max may drop a letter"
    if groups and (operation != RESHAPE or not set("".join(groups)) <= set(lengths)):
        return "only a reshape has parentheses, and it must state the length of each letter in them"
    return ""


def _term(text: str, equation: str) -> Term:
    if not _TERM.fullmatch(text):
        raise ValueError(
            f"{equation!r} is not an equation: {text!r} may contain only letters, and pairs of parentheses"
        )
    return tuple(group.strip("()") for group in re.findall(r"[a-zA-Z]|\([a-zA-Z]+\)", text))


def dim_of(letter: str, term: Term) -> int | None:
    """Return the dimension of a tensor that begins with a letter, or None if there is none."""
    return next((dim for dim, letters in enumerate(term) if letters.startswith(letter)), None)
