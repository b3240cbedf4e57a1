"""Judge how much memory a rank holds with a sharded optimizer, between calls and at the peak of a step.

There are three counts, because each sees something that the others miss. The memory ledger names components and follows
the allocations of a step. The second count adds up every tensor that lives on this rank, in whichever attribute,
closure or list it is kept. The third finds objects that are not tensors but may hold the values of one.
"""

from dataclasses import dataclass, field

from shared import memory
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import hidden_bytes, ignore_existing_objects, living_bytes, settled_bytes

SLACK = 1.01  # padding, Adam's step counters, inputs
_HINT_ON_COPIES = "Hint: which tensors exist twice, and what keeps them alive?"


@dataclass
class Held:
    """The bytes that a rank holds."""

    at: dict[str, int]  # in tensors, by moment
    components: dict[str, int]  # at the end, by component
    hidden: int  # at the end, in objects that are not tensors


class Observer:
    """Counts, on this rank, the bytes of everything that is allocated from now on.

    Args:
        most_bytes: The bytes that are expected at each moment, so that no count waits longer than necessary.
    """

    def __init__(self, most_bytes: dict[str, float]):
        ignore_existing_objects()
        self.most_bytes, self.before_bytes = most_bytes, living_bytes()
        self.held: dict[str, int] = {}

    def note(self, moment: str) -> None:
        self.held[moment] = settled_bytes(SLACK * self.most_bytes[moment], self.before_bytes)

    def report(self, module, optimizer) -> Held:
        components = memory.held(module, optimizer).by_component()
        return Held(self.held, components, hidden_bytes())


@dataclass(frozen=True)
class Expected:
    """What a rank may hold."""

    moments: dict[str, float]  # the bytes by moment; the first one is also that of the count by component
    state: float  # the bytes of this rank's shard of the optimizer state
    least: float  # the bytes that a rank must hold at the first moment
    hints: dict[str, str] = field(default_factory=dict)  # by moment, or by component that should hold nothing


def judge_held(found: dict[int, Held], expected: Expected, context: str) -> None:
    """Check that each rank holds what is expected.

    Args:
        found: What the observers have reported, by global rank.
        expected: What is expected.
        context: What was tried.

    Raises:
        Wrong: If a rank holds more, or less.
    """
    first = next(iter(expected.moments))
    for rank, report in found.items():
        components, held, hidden = report.components, report.at, report.hidden
        total = sum(components.values())
        named = ", ".join(f"{name} {nbytes:,}" for name, nbytes in components.items() if nbytes)
        unexpected = [hint for name, hint in expected.hints.items() if components.get(name)]
        claims = [
            (
                components["optimizer"] <= SLACK * expected.state,
                f"the optimizer holds {components['optimizer']:,} bytes; expected {expected.state:,.0f}",
                "Hint: which parameters does the inner optimizer get, and how large are they?",
            )
        ]
        for moment, most in expected.moments.items():
            nbytes = max(held[moment], total if moment == first else 0)
            evidence = f"{moment}, {nbytes:,} bytes are held; expected {most:,.0f}. {first}, by component: {named}"
            hint = unexpected[0] if unexpected and moment == first else expected.hints.get(moment, _HINT_ON_COPIES)
            claims.append((nbytes <= SLACK * most, evidence, hint))
        claims += [
            (
                hidden <= (SLACK - 1) * expected.moments[first],
                f"{hidden:,} bytes are in NumPy arrays, bytes objects or storages rather than tensors; expected none",
                "Hint: which values do these objects hold, and does this rank need them?",
            ),
            (
                held[first] >= expected.least / SLACK,
                f"{held[first]:,} bytes are in tensors, but parameters and state alone need {expected.least:,.0f}",
                "Hint: where is this rank's shard of the optimizer state?",
            ),
        ]
        for holds, evidence, hint in claims:
            if not holds:
                raise Wrong({rank: f"{context}, {evidence}"}, hint)
