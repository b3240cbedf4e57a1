"""Warms up as without chunks, which deadlocks.

caught by: interleaved · the example
"""

from solutions import pipeline_schedules as right


def interleaved(stages, micro_batches, chunks):
    schedule = right.interleaved(stages, micro_batches, chunks)
    by_kind = [([a for a in each if a.kind == "F"], [a for a in each if a.kind == "B"]) for each in schedule]
    return [right.alternate(*both, stages - stage - 1) for stage, both in enumerate(by_kind)]
