"""Tries ever smaller caps, and stops when the step becomes longer.

caught by: best_cap_bytes · best
"""

from solutions import scaling as right


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    best, best_s = None, float("inf")
    for cap in sorted(caps_bytes, reverse=True):
        step_s = right.predict_step_s(right.buckets_of(gradients, cap), compute_s, ranks, alpha_s, beta_s)
        if step_s > best_s:
            break
        best, best_s = cap, step_s
    return best
