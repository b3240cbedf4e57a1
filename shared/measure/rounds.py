"""Time jobs in rounds on all ranks together. The package's docstring says what is estimated, and why."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from shared.deadlines import MOST_ROUNDS
from shared.measure.links import where
from shared.tables import ShowsTable, Table
from shared.wire import instrumentation, mismatch

ROUNDS = 20
WARM_UP_ROUNDS = 2


def _nothing() -> None:
    pass


def in_ms(time_s: float) -> str:
    """Write a time in ms with three digits, because an all-reduce on GPUs is much shorter than a training step."""
    return f"{1e3 * time_s:.3g}" if time_s < 0.1 else f"{1e3 * time_s:,.0f}"


@dataclass(frozen=True)
class Job:
    """Something that all ranks do together, in one or more phases.

    Attributes:
        phases: The functions to run, by name, in this order.
        prepare: Runs before the ranks meet at the barrier. Its time does not count.
    """

    phases: Mapping[str, Callable[[], object]]
    prepare: Callable[[], object] = _nothing

    def marks_s(self, now_s: Callable[[], float]) -> list[float]:
        """Run the job once. Returns when this rank entered it, and when it left each phase."""
        self.prepare()
        if dist.is_initialized():
            dist.barrier()
        marks_s = [now_s()]
        for phase in self.phases.values():
            phase()
            marks_s.append(now_s())
        return marks_s


@dataclass(frozen=True)
class Times:
    """The times of one job: one per round and phase. A phase ends when the last rank has left it."""

    phases_s: dict[str, tuple[float, ...]]

    @classmethod
    def of_marks(cls, phases: list[str], marks_s: list[list[list[float]]]) -> "Times":
        """Combine the marks of all ranks.

        Shape: marks_s [ranks][rounds][1 + phases].
        """
        by_round = [[max(marks) for marks in zip(*ranks_s, strict=True)] for ranks_s in zip(*marks_s, strict=True)]
        lasts_s = [[end - begin for begin, end in pairwise(last_s)] for last_s in by_round]
        return cls(dict(zip(phases, zip(*lasts_s, strict=True), strict=True)))

    @cached_property
    def rounds_s(self) -> tuple[float, ...]:
        """The time of each round, from the first phase to the last."""
        return tuple(map(sum, zip(*self.phases_s.values(), strict=True)))

    @property
    def time_s(self) -> float:
        """The estimate: the median of the rounds."""
        return statistics.median(self.rounds_s)

    @property
    def time_ms(self) -> float:
        return 1e3 * self.time_s

    @property
    def median_round(self) -> int:
        """The index of the round in the middle; of the two in the middle, if their number is even, the faster one."""
        return self.rounds_s.index(statistics.median_low(self.rounds_s))

    @property
    def fastest_s(self) -> float:
        return min(self.rounds_s)

    def phase_ms(self) -> dict[str, float]:
        """Return the median of each phase, in ms. Medians of phases need not add up to the median of their sum."""
        return {name: 1e3 * statistics.median(rounds_s) for name, rounds_s in self.phases_s.items()}

    def divided_by(self, count: int) -> "Times":
        """Return the times of one of `count` equal pieces."""
        return Times({name: tuple(lasts_s / count for lasts_s in rounds_s) for name, rounds_s in self.phases_s.items()})


@dataclass(frozen=True, repr=False)
class Measured(ShowsTable):
    """The times of several jobs that took turns, by name."""

    times: dict[str, Times]
    ranks: int
    where: str = field(default_factory=where)

    def __getitem__(self, name) -> Times:
        return self.times[name]

    def ms(self) -> dict[str, float]:
        """Return the estimate for each job, in ms, as `plots.bars` takes it."""
        return {name: times.time_ms for name, times in self.times.items()}

    def parts_ms(self) -> dict[str, dict[str, float]]:
        """Return the median of each phase of each job, in ms."""
        return {name: times.phase_ms() for name, times in self.times.items()}

    def ratio(self, name: str, other: str) -> float:
        """Return the median, over the rounds, of the time of one job over that of another one in the same round."""
        pairs = zip(self.times[name].rounds_s, self.times[other].rounds_s, strict=True)
        return statistics.median(one_s / other_s for one_s, other_s in pairs)

    def table(self) -> Table:
        rows = [
            [name, *map(in_ms, (times.time_s, times.fastest_s, max(times.rounds_s)))]
            for name, times in self.times.items()
        ]
        rounds = len(next(iter(self.times.values())).rounds_s)
        note = f"{self.ranks} ranks, {rounds} rounds, {self.where}"
        return Table(["", "median, ms", "fastest, ms", "slowest, ms"], rows, note)


def now_s() -> float:
    """Return the time at which this rank's current stream has completed its work; without a GPU, the time now."""
    instrumentation.synchronize(pause_s=0.0)
    return time.perf_counter()


def limited(rounds: int) -> int:
    """Return the number of rounds, but at most COURSE_ROUNDS if this environment variable is set."""
    return min(rounds, int(os.environ.get(MOST_ROUNDS) or rounds))


def as_job(job: Job | Callable[[], object]) -> Job:
    """Return a job as it is, and a function as a job of one phase."""
    return job if isinstance(job, Job) else Job({"": job})


def jobs(
    to_time: Mapping[Any, Job | Callable[[], object]],
    *,
    rounds: int = ROUNDS,
    warm_up_rounds: int = WARM_UP_ROUNDS,
    now_s: Callable[[], float] = now_s,
) -> Measured:
    """Time jobs in turn. Runs on all ranks together, and returns the same on each.

    Where there is no process group, it times the jobs in this process alone.

    Args:
        to_time: The jobs, by name. A function is a job of one phase.
        rounds: How many rounds count. COURSE_ROUNDS limits this number.
        now_s: Reads a clock that all ranks share.

    Raises:
        ValueError: If there is no job, or no round counts.
    """
    if not to_time or rounds < 1:
        raise ValueError(f"expected at least one job and one round, got {len(to_time)} jobs and rounds={rounds}")
    rounds = limited(rounds)
    named = {name: as_job(job) for name, job in to_time.items()}
    marks_s: dict[str, list] = {name: [] for name in named}
    with mismatch.paused():
        for index in range(warm_up_rounds + rounds):
            for name in random.Random(index).sample(list(named), len(named)):
                marks_s[name].append(named[name].marks_s(now_s))
        of_ranks = of_all_ranks(list(marks_s.values()))
    times = {}
    for name, marks_of_ranks in zip(named, zip(*of_ranks, strict=True), strict=True):
        counted = [of_rank[warm_up_rounds:] for of_rank in marks_of_ranks]
        times[name] = Times.of_marks(list(named[name].phases), counted)
    return Measured(times, len(of_ranks))


def of_all_ranks(value: object) -> list:
    """Return the value of every rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- record jobs in rounds, and keep what all ranks saw in the round of median length


def recorded(
    to_record: Mapping[str, Job | Callable[[], object]],
    record: Callable[[], AbstractContextManager],
    *,
    by: Callable[[Any], float] | None = None,
    rounds: int = ROUNDS,
    warm_up_rounds: int = WARM_UP_ROUNDS,
) -> dict[str, list]:
    """Record jobs in turn. Runs on all ranks together, and returns the same on each.

    Args:
        to_record: The jobs, by name. Their preparation is not recorded.
        record: Opens a recording, such as `wire.ledger`, or `lambda: timeline.record(model)`.
        by: Returns a number for each recording, such as `lambda line: line.exposed_ms`. The round is then the one in
            which rank 0's number is the median.

    Returns:
        For each job, one recording per rank: those of the round whose time is the median.
    """
    recordings: dict[str, list] = {name: [] for name in to_record}

    def with_recording(name: str, job: Job) -> Job:
        def run() -> None:
            with record() as recording:
                for phase in job.phases.values():
                    phase()
            recordings[name].append(recording)

        return Job({"": run}, job.prepare)

    to_time = {name: with_recording(name, as_job(job)) for name, job in to_record.items()}
    measured = jobs(to_time, rounds=rounds, warm_up_rounds=warm_up_rounds)
    found = {}
    for name in to_record:
        counted = recordings[name][warm_up_rounds:]
        index = measured[name].median_round
        if by is not None:
            numbers = of_all_ranks([by(recording) for recording in counted])[0]
            index = numbers.index(statistics.median_low(numbers))
        found[name] = of_all_ranks(counted[index])
    return found
