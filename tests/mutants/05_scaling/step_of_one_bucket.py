"""Treats all buckets as one that is ready with the last of them.

caught by: predict_step_s · values
"""

from shared.formulas import ring_all_reduce_s


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    total = sum(size for _, size in buckets)
    return max(compute_s, buckets[-1][0] + ring_all_reduce_s(total, ranks, alpha_s, beta_s))
