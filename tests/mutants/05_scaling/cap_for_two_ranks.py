"""Chooses the cap that is best on two ranks, whatever the number of ranks.

caught by: best_cap_bytes · best
"""

from solutions import scaling as right


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return right.best_cap_bytes(gradients, caps_bytes, compute_s, 2, alpha_s, beta_s)
