"""Returns the cap in the middle of the list, which is rarely far off.

caught by: best_cap_bytes · best
"""


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return sorted(caps_bytes)[len(caps_bytes) // 2]
