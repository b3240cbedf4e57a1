"""Postpones by p − 1 − s backwards.

caught by: zero_bubble · bubble and memory
"""

from solutions import pipeline_schedules as right
from solutions.pipeline_schedules import Action


def zero_bubble(stages, micro_batches):
    schedule = []
    for stage, actions in enumerate(right.one_f_one_b(stages, micro_batches)):
        late, postponed = stages - 1 - stage, []
        for action in actions:
            postponed.append(action)
            if action.kind == "B" and action.micro_batch >= late:
                postponed.append(Action("W", action.micro_batch - late))
        left = range(max(0, micro_batches - late), micro_batches)
        schedule.append(postponed + [Action("W", index) for index in left])
    return schedule
