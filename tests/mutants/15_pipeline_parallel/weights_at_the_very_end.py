"""Runs every W at the end, which holds all micro-batches.

caught by: zero_bubble · bubble and memory
"""

from solutions import pipeline_schedules as right
from solutions.pipeline_schedules import Action


def zero_bubble(stages, micro_batches):
    late = [Action("W", index) for index in range(micro_batches)]
    return [actions + late for actions in right.one_f_one_b(stages, micro_batches)]
