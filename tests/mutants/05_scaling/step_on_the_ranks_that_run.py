"""Predicts for the ranks that run the check, not for those that it is asked for.

caught by: predict_step_s · values
"""

import torch.distributed as dist

from solutions import scaling as right


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    return right.predict_step_s(buckets, compute_s, dist.get_world_size(), alpha_s, beta_s)
