"""Runs all chunks of a micro-batch before the next micro-batch.

caught by: interleaved · the example
"""

from solutions import pipeline_schedules as right
from solutions.pipeline_schedules import Action


def interleaved(stages, micro_batches, chunks):
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} is not a multiple of {stages}")
    forwards = [Action("F", index, chunk) for index in range(micro_batches) for chunk in range(chunks)]
    backwards = [Action("B", index, chunk) for index in range(micro_batches) for chunk in reversed(range(chunks))]
    warm_ups = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [right.alternate(forwards, backwards, warm_up) for warm_up in warm_ups]
