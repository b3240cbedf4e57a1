"""Returns the share of the step that communication takes.

caught by: efficiency · weak
"""

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return 1 - right.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind)
