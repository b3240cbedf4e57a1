"""Assumes that in strong scaling a rank sends only 1/N of the bytes.

caught by: efficiency · strong
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    if kind == "strong":
        compute_s /= ranks
        gradients = [(ready_s / ranks, size / ranks) for ready_s, size in gradients]
    return right.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s)
