"""Returns 1, which weak scaling over a fast link comes close to.

caught by: efficiency · weak
"""


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return 1.0 if kind == "weak" else 1.0 / ranks
