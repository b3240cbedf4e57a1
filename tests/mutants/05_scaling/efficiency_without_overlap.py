"""Adds the time of all all-reduces to the computation.

caught by: efficiency · weak
"""

from shared.formulas import ring_all_reduce_s
from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    share = 1 / ranks if kind == "strong" else 1.0
    buckets = right.buckets_of(gradients, cap_bytes)
    wire_s = sum(ring_all_reduce_s(size, ranks, alpha_s, beta_s) for _, size in buckets)
    return share * compute_s / (share * compute_s + wire_s)
