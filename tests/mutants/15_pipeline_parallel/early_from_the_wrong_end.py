"""Gives the last stage the longest warm-up.

caught by: one_f_one_b · the table
"""

from solutions import pipeline_schedules as right


def one_f_one_b(stages, micro_batches):
    return right.one_f_one_b(stages, micro_batches)[::-1]
