"""Removes the gradients from the caller's list, so the second cap has none.

caught by: best_cap_bytes · best
"""

from solutions import scaling as right


def buckets_of(gradients, cap_bytes):
    buckets = right.buckets_of(gradients, cap_bytes)
    gradients.clear()
    return buckets


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    def step_s(cap_bytes):
        return right.predict_step_s(buckets_of(gradients, cap_bytes), compute_s, ranks, alpha_s, beta_s)

    return min(caps_bytes, key=step_s)
