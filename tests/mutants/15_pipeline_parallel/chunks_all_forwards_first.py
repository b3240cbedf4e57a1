"""Runs all forwards before the first backward.

caught by: interleaved · bubble and memory
"""

from solutions import pipeline_schedules as right


def interleaved(stages, micro_batches, chunks):
    schedule = right.interleaved(stages, micro_batches, chunks)
    return [sorted(actions, key=lambda action: action.kind == "B") for actions in schedule]
