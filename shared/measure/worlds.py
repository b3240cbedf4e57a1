"""Measure a training step on 1, 2 and 4 ranks: weak scaling, and what communication costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared import ranks
from shared.measure.rounds import Measured, in_ms
from shared.tables import ShowsTable, Table

STEP, WITHOUT = "step", "without communication"  # the names of the jobs that a function must measure


@dataclass(frozen=True, repr=False)
class Scaling(ShowsTable):
    """A step on several numbers of ranks.

    In weak scaling, every rank has a batch of its own: the efficiency is T₁/T_N. T₁ is the step without communication
    on one rank, which has nobody to communicate with, so the efficiency of one rank is 1. The efficiency is the product
    of two factors:

        computation     the efficiency that the step would have without communication. It is 1 if ranks do not slow each
                        other down. On shared cores, they do.
        communication   the time of the step without communication over that of the step, on the same number of ranks
    """

    measured: dict[int, Measured]  # by the number of ranks

    def step_s(self, count: int) -> float:
        return self.measured[count][WITHOUT if count == 1 else STEP].time_s

    def without_communication_s(self, count: int) -> float:
        return self.measured[count][WITHOUT].time_s

    def efficiency(self, count: int) -> float:
        return self.computation(count) * self.communication(count)

    def computation(self, count: int) -> float:
        return self.without_communication_s(1) / self.without_communication_s(count)

    def communication(self, count: int) -> float:
        return self.without_communication_s(count) / self.step_s(count)

    def speed_up(self, count: int) -> float:
        """Return the samples per second of all ranks together, divided by those of one rank."""
        return count * self.efficiency(count)

    def table(self) -> Table:
        rows = []
        for count in self.measured:
            times_ms = [in_ms(self.without_communication_s(count)), in_ms(self.step_s(count))]
            factors = [f"{each(count):.0%}" for each in (self.computation, self.communication, self.efficiency)]
            rows.append([f"{count}", *times_ms, *factors, f"{self.speed_up(count):.2f}"])
        header = ["ranks", "without communication, ms", "step, ms", "computation", "communication", "efficiency"]
        note = f"weak scaling, {self.measured[1].where}; efficiency = computation × communication"
        return Table([*header, "speed-up"], rows, note)


def scaling(function_name: str, counts: Sequence[int] = (1, 2, 4), **options) -> Scaling:
    """Measure a step on several numbers of ranks. Call this from the notebook, while ranks are running.

    Args:
        function_name: The name of a function that you defined on the ranks. It builds the model in the current process
            group, and returns `measure.jobs` of two training steps, "step" and "without communication".
        options: Those of `ranks.run`, such as timeout_s.

    Raises:
        ValueError: If counts lacks 1, because all efficiencies refer to one rank.
    """
    if 1 not in counts:
        raise ValueError(f"counts must contain 1, got {counts}")
    measured = {}
    for count in counts:
        with ranks.world(count):
            measured[count] = ranks.run(_call, function_name, **options)[0]
    return Scaling(measured)


def _call(function_name: str) -> Measured:
    from shared.ranks import rankside

    return rankside.lookup(function_name)()
