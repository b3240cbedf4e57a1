"""Records when the parameters of each unit have memory, by looking at them after every operator of a step.

    with lifetimes.follow(look) as life:        # look() → {name of a unit: (state, bytes)}
        model(inputs).backward()
    life.peak_bytes, life.gathers("block 0")

The x-axis is operators because their count, unlike milliseconds, is the same in every run. `shared/plots/lifetimes.py`
draws the result.
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
    """A unit in one state, from the index of the operator `began` up to, but not including, `ended`."""

    state: str
    nbytes: int
    began: int
    ended: int


@dataclass
class Lifetimes:
    """The state and the bytes of each unit over the recorded operators."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    operators: int = 0
    backward: tuple[int, int] | None = None  # the index of its first operator, and of the first operator after it

    @property
    def total_bytes(self) -> list[int]:
        """The bytes of all units together, after each operator."""
        totals = [0] * self.operators
        for span in (span for spans in self.spans.values() for span in spans):
            for at in range(span.began, span.ended):
                totals[at] += span.nbytes
        return totals

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes, default=0)

    def gathers(self, unit: str) -> int:
        """Return how often a unit was unsharded, that is, went from 0 bytes to more."""
        held = [0, *(span.nbytes for span in self.spans[unit])]
        return sum(before == 0 < now for before, now in pairwise(held))

    def note(self, looked: dict[str, tuple[str, int]]) -> None:
        """Add one observation, made after an operator."""
        if torch._C._current_graph_task_id() != -1:
            first, _ = self.backward or (self.operators, None)
            self.backward = first, self.operators + 1
        for name, (state, nbytes) in looked.items():
            spans = self.spans.setdefault(name, [])
            if not spans or (spans[-1].state, spans[-1].nbytes) != (state, nbytes):
                spans.append(Span(state, nbytes, self.operators, self.operators))
            spans[-1].ended = self.operators + 1
        self.operators += 1


@contextlib.contextmanager
def follow(look: Look):
    """Look at the units after each operator of the block. Yields Lifetimes.

    Args:
        look: Must not read tensors whose memory is freed. The nbytes() of a storage can be read at any time.
    """
    life = Lifetimes()
    with _AfterEachOperator(lambda: life.note(look())):
        yield life


class _AfterEachOperator(TorchDispatchMode):
    def __init__(self, call: Callable[[], None]):
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.call()
        return result
