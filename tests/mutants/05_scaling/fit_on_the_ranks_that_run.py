"""Fits for the ranks that run the check, not for those that were measured.

caught by: fit_alpha_beta · values
"""

import torch.distributed as dist

from solutions import scaling as right


def fit_alpha_beta(times_s, ranks):
    return right.fit_alpha_beta(times_s, dist.get_world_size())
