"""Exposes only the all-reduce of the last bucket.

caught by: predict_step_s · values
"""

from shared.formulas import ring_all_reduce_s


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    ready_s, size = buckets[-1]
    return max(compute_s, ready_s + ring_all_reduce_s(size, ranks, alpha_s, beta_s))
