"""Takes strong scaling for the default.

caught by: efficiency · weak
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="strong"):
    return right.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind)
