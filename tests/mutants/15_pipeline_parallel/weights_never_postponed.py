"""Runs W right after each B.

caught by: zero_bubble · bubble and memory
"""

from solutions import pipeline_schedules as right


def zero_bubble(stages, micro_batches):
    return [
        [each for a in actions for each in ((a, a._replace(kind="W")) if a.kind == "B" else (a,))]
        for actions in right.one_f_one_b(stages, micro_batches)
    ]
