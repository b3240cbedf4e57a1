"""Warms up with one forward too many.

caught by: one_f_one_b · the table
"""

from solutions import pipeline_schedules as right


def one_f_one_b(stages, micro_batches):
    (actions,) = right.gpipe(1, micro_batches)
    forwards, backwards = actions[:micro_batches], actions[micro_batches:]
    return [right.alternate(forwards, backwards, stages - stage) for stage in range(stages)]
