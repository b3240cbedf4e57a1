"""Records when the parameters of each unit have memory, after every operator of a step.

    with lifetimes.follow(lifetimes.states_of(flats)) as life:      # flats = {"block 0": …}
        model(inputs).backward()
    life.peak_bytes, life.unshards("block 0")

Unlike milliseconds, the number of operators is the same in every run. `plots.lifetimes` draws the figures.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Look = Callable[[], dict[str, tuple[str, int]]]


@dataclass
class Span:
    """A unit in one state: from operator `began` until before operator `ended`."""

    state: str
    nbytes: int
    began: int
    ended: int


@dataclass
class Lifetimes:
    """The states that each unit went through while it was followed."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    operators: int = 0
    backward: tuple[int, int] | None = None  # the first operator of backward, and the first one after it

    @property
    def total_bytes(self) -> list[int]:
        """The bytes of all units together, after each operator."""
        totals = [0] * self.operators
        for span in (span for spans in self.spans.values() for span in spans):
            for operator in range(span.began, span.ended):
                totals[operator] += span.nbytes
        return totals

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes, default=0)

    def unshards(self, unit: str) -> int:
        """Count how often a unit got memory."""
        held = [0, *(span.nbytes for span in self.spans[unit])]
        return sum(before == 0 < now for before, now in pairwise(held))

    def add(self, states: dict[str, tuple[str, int]]) -> None:
        """Add the state and the bytes of each unit after one more operator."""
        if torch._C._current_graph_task_id() != -1:
            first, _ = self.backward or (self.operators, None)
            self.backward = first, self.operators + 1
        for name, (state, nbytes) in states.items():
            spans = self.spans.setdefault(name, [])
            if not spans or (spans[-1].state, spans[-1].nbytes) != (state, nbytes):
                spans.append(Span(state, nbytes, self.operators, self.operators))
            spans[-1].ended = self.operators + 1
        self.operators += 1


def states_of(flats: dict) -> Look:
    """Return a `look` for `follow`, at units that have a `state` and a `flat_param`.

    Args:
        flats: The units, by name.
    """
    return lambda: {name: (flat.state, flat.flat_param.untyped_storage().nbytes()) for name, flat in flats.items()}


@contextlib.contextmanager
def follow(look: Look):
    """Call `look` after each operator of the with-block. Yields the Lifetimes.

    Args:
        look: Returns the state and the bytes of each unit. It must not read a tensor without memory, but it can ask any
            storage for its nbytes().
    """
    life = Lifetimes()
    with _AfterEachOperator(lambda: life.add(look())):
        yield life


class _AfterEachOperator(TorchDispatchMode):
    def __init__(self, call: Callable[[], None]):
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.call()
        return result
