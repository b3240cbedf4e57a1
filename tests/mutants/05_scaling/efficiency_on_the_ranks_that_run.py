"""Predicts for the ranks that run the check, not for those that it is asked for.

caught by: efficiency · weak
"""

import torch.distributed as dist

from solutions import scaling as right


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    return right.efficiency(gradients, compute_s, cap_bytes, dist.get_world_size(), alpha_s, beta_s, kind)
