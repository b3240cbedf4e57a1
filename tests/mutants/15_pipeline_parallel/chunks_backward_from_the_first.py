"""Runs the backwards of chunk 0 first.

caught by: interleaved · the example
"""

from solutions import pipeline_schedules as right


def interleaved(stages, micro_batches, chunks):
    schedule = right.interleaved(stages, micro_batches, chunks)
    return [[a._replace(chunk=chunks - 1 - a.chunk) if a.kind == "B" else a for a in actions] for actions in schedule]
