"""Takes the largest cap, which costs the least latency but starts late.

caught by: best_cap_bytes · best
"""


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return max(caps_bytes)
