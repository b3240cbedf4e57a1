"""Forgets that there may be fewer micro-batches than stages.

caught by: zero_bubble · bubble and memory
"""

from shared.schedules import Action
from solutions import pipeline_schedules as right


def zero_bubble(stages, micro_batches):
    schedule = []
    for stage, actions in enumerate(right.one_f_one_b(stages, micro_batches)):
        postponed = []
        for action in actions:
            postponed.append(action)
            if action.kind == "B" and action.micro_batch >= stage:
                postponed.append(Action("W", action.micro_batch - stage))
        left = range(micro_batches - stage, micro_batches)
        schedule.append(postponed + [Action("W", index) for index in left])
    return schedule
