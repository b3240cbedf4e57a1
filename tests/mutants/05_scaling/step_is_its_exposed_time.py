"""Returns the exposed time without the time of the computation.

caught by: predict_step_s · values
"""

from solutions import scaling as right


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    return right.predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s) - compute_s
