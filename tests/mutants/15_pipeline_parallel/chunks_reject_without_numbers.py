"""Says nothing about the numbers that do not divide.

caught by: interleaved · rejections
"""

from solutions import pipeline_schedules as right


def interleaved(stages, micro_batches, chunks):
    if micro_batches % stages:
        raise ValueError("the micro-batches do not divide")
    return right.interleaved(stages, micro_batches, chunks)
