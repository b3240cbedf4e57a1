"""Treats weak scaling like strong scaling.

caught by: efficiency · weak
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return right.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, "strong")
