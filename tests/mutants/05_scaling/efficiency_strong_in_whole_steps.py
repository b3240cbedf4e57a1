"""Divides the step of weak scaling by the number of ranks.

caught by: efficiency · strong
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    weak = right.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s)
    return weak if kind == "weak" else weak / ranks
