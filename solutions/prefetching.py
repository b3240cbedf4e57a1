# Built by `make notebooks` from source/09_zero3/lab.py: edit that, not this.
"""Prefetching: the all-gathers of the next units are launched before anything waits for them."""

from collections.abc import Collection

from solutions.units import Unit


class Prefetcher:
    """Launches the all-gathers of the next units while the current one computes.

    In forward, it expects the order of the previous forward; in backward, the reverse of this forward's order.

    Args:
        units_ahead: how many units to prefetch.
    """

    def __init__(self, units_ahead: int):
        self.units_ahead = units_ahead
        # In the order of their calls: the units of the previous forward, and those of this one.
        self.expected: list[Unit] = []
        self.called: list[Unit] = []

    def begin_forward(self) -> None:
        """Expect the order of the forward that has just ended, and record the calls of a new one."""
        self.expected, self.called = self.called, []

    def in_forward(self, unit: Unit) -> None:
        """Prefetch what followed this unit in the previous forward, as long as the order is the same."""
        self.called.append(unit)
        if self.called == self.expected[: len(self.called)]:
            self._unshard(self.expected[len(self.called) :])

    def in_backward(self, unit: Unit, unreached: Collection[Unit] = ()) -> None:
        """Prefetch the units that were called before this one, except those that backward does not reach."""
        if unit in self.called:  # otherwise, the unit belongs to an earlier forward
            reversed_calls = self.called[::-1]
            following = reversed_calls[reversed_calls.index(unit) + 1 :]
            self._unshard([earlier for earlier in following if earlier not in unreached])

    def _unshard(self, following: list[Unit]) -> None:
        """Launch the all-gathers of the first units_ahead units of a list."""
        for unit in following[: self.units_ahead]:
            unit.unshard()
