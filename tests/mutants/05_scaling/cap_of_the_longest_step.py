"""Returns the cap with the longest step.

caught by: best_cap_bytes · best
"""

from solutions import scaling as right


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    def minus_step_s(cap_bytes):
        buckets = right.buckets_of(gradients, cap_bytes)
        return -right.predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s)

    return min(caps_bytes, key=minus_step_s)
