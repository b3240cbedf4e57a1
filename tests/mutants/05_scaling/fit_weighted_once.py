"""Weights the squared errors by 1/measured instead of its square.

caught by: fit_alpha_beta · noise
"""

import torch


def fit_alpha_beta(times_s, ranks):
    measured = torch.tensor(list(times_s.values()), dtype=torch.float64)
    megabytes = torch.tensor(list(times_s), dtype=torch.float64) / 1e6
    steps = 2 * (ranks - 1)
    columns = torch.stack([torch.full_like(megabytes, steps), steps / ranks * megabytes], dim=1)
    weights = measured.rsqrt()
    solution = torch.linalg.lstsq(columns * weights[:, None], (measured * weights)[:, None]).solution
    return solution[0].item(), solution[1].item() / 1e6
