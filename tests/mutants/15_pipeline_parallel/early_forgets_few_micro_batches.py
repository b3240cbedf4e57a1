"""Warms up with forwards that do not exist if there are fewer micro-batches than stages.

caught by: one_f_one_b · bubble and memory
"""

from solutions import pipeline_schedules as right
from solutions.pipeline_schedules import Action


def one_f_one_b(stages, micro_batches):
    schedule = right.one_f_one_b(stages, micro_batches)
    if micro_batches < stages:
        schedule[0] = [Action("F", index) for index in range(stages - 1)] + schedule[0][micro_batches:]
    return schedule
