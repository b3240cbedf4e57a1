"""Runs a chunk for all micro-batches before the next chunk.

caught by: interleaved · the example
"""

from solutions.pipeline_schedules import Action


def interleaved(stages, micro_batches, chunks):
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} is not a multiple of {stages}")
    forwards = [Action("F", index, chunk) for chunk in range(chunks) for index in range(micro_batches)]
    backwards = [Action("B", index, chunk) for chunk in reversed(range(chunks)) for index in range(micro_batches)]
    return [forwards + backwards for _ in range(stages)]
