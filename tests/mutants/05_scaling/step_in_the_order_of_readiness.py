"""Launches buckets in the order in which they are ready, not in launch order.

caught by: predict_step_s · values
"""

from solutions import scaling as right


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    return right.predict_step_s(sorted(buckets), compute_s, ranks, alpha_s, beta_s)
