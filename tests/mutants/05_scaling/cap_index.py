"""Returns the index of the best cap.

caught by: best_cap_bytes · best
"""

from solutions import scaling as right


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return caps_bytes.index(right.best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s))
