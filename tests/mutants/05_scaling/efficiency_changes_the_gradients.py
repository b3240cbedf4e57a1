"""Scales the times in the caller's list, so the next call scales them again.

caught by: efficiency · strong
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    share = 1 / ranks if kind == "strong" else 1.0
    for index, (ready_s, size_bytes) in enumerate(gradients):
        gradients[index] = (share * ready_s, size_bytes)
    buckets = right.buckets_of(gradients, cap_bytes)
    return share * compute_s / right.predict_step_s(buckets, share * compute_s, ranks, alpha_s, beta_s)
