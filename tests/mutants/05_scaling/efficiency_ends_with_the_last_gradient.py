"""Takes the last gradient for the end of backward.

caught by: efficiency · weak
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return right.efficiency(gradients, gradients[-1][0], cap_bytes, ranks, alpha_s, beta_s, kind)
