"""Ends the step with the last all-reduce, even if backward is not over.

caught by: predict_step_s · values
"""

from shared.formulas import ring_all_reduce_s


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    free_s = 0.0
    for ready_s, size in buckets:
        free_s = max(free_s, ready_s) + ring_all_reduce_s(size, ranks, alpha_s, beta_s)
    return free_s
