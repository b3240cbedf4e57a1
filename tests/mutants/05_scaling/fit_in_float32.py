"""Computes the sums in float32.

caught by: fit_alpha_beta · values
"""

import torch


def fit_alpha_beta(times_s, ranks):
    measured = torch.tensor(list(times_s.values()), dtype=torch.float32)
    sizes = torch.tensor(list(times_s), dtype=torch.float32)
    steps = 2 * (ranks - 1)
    u, v = steps / measured, steps / ranks * sizes / measured
    determinant = (u @ u) * (v @ v) - (u @ v) ** 2
    alpha_s = (u.sum() * (v @ v) - v.sum() * (u @ v)) / determinant
    beta_s = (v.sum() * (u @ u) - u.sum() * (u @ v)) / determinant
    return alpha_s.item(), beta_s.item()
