"""Ignores the latency that each bucket costs.

caught by: best_cap_bytes · best
"""

from solutions import scaling as right


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return right.best_cap_bytes(gradients, sorted(caps_bytes), compute_s, ranks, 0.0, beta_s)
