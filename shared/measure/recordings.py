"""Record jobs in rounds, and keep what all ranks saw in the round of median length."""

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from shared.measure.rounds import ROUNDS, WARM_UP_ROUNDS, Job, as_job, jobs, of_all_ranks


def recorded(
    to_record: Mapping[str, Job | Callable[[], object]],
    record: Callable[[], AbstractContextManager],
    *,
    by: Callable[[object], float] | None = None,
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
