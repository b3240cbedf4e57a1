"""Takes the smallest cap, which starts early but costs the most latency.

caught by: best_cap_bytes · best
"""


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return min(caps_bytes)
