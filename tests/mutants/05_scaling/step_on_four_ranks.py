"""Predicts a step on four ranks, whatever it is asked for.

caught by: predict_step_s · values
"""

from solutions import scaling as right


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    return right.predict_step_s(buckets, compute_s, 4, alpha_s, beta_s)
