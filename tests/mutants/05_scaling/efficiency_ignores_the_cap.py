"""Puts every gradient into a bucket of its own.

caught by: efficiency · weak
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return right.efficiency(gradients, compute_s, 0, ranks, alpha_s, beta_s, kind)
