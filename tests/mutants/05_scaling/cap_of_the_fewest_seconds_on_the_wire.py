"""Minimizes the sum of the all-reduces, without overlap.

caught by: best_cap_bytes · best
"""

from shared.formulas import ring_all_reduce_s
from solutions import scaling as right


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    def on_the_wire_s(cap_bytes):
        buckets = right.buckets_of(gradients, cap_bytes)
        return sum(ring_all_reduce_s(size, ranks, alpha_s, beta_s) for _, size in buckets)

    return min(caps_bytes, key=on_the_wire_s)
