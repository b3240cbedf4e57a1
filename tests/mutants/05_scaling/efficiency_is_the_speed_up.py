"""Returns the speed-up, which is N times the efficiency.

caught by: efficiency · weak
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return ranks * right.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind)
