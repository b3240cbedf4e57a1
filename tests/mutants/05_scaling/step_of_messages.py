"""Predicts one message per bucket, whatever the number of ranks.

caught by: predict_step_s · values
"""


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    free_s = 0.0
    for ready_s, size in buckets:
        free_s = max(free_s, ready_s) + (alpha_s + beta_s * size if ranks > 1 else 0.0)
    return max(compute_s, free_s)
