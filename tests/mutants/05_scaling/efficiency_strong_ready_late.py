"""Shortens the computation in strong scaling, but not the times at which gradients are ready.

caught by: efficiency · strong
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    if kind == "strong":
        compute_s /= ranks
    buckets = right.buckets_of(gradients, cap_bytes)
    return compute_s / right.predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s)
