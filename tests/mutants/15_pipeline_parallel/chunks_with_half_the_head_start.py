"""Starts one forward earlier than the next stage, not two, so that every message makes a stage wait.

caught by: interleaved · bubble and memory
"""

from solutions import pipeline_schedules as right


def interleaved(stages, micro_batches, chunks):
    schedule = right.interleaved(stages, micro_batches, chunks)
    by_kind = [([a for a in each if a.kind == "F"], [a for a in each if a.kind == "B"]) for each in schedule]
    warm_ups = [stages - stage - 1 + (chunks - 1) * stages for stage in range(stages)]
    return [right.alternate(*both, warm_up) for both, warm_up in zip(by_kind, warm_ups, strict=True)]
