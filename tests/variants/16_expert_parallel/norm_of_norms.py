"""Computes this rank's norm first, then squares it again."""

import torch
import torch.distributed as dist


def gradient_norm(module, group=None):
    own = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in module.parameters() if p.grad is not None]
    start = next(module.parameters()).new_zeros(1, dtype=torch.float64)
    squared = torch.cat([start, *(norm.reshape(1) for norm in own)]).square().sum()
    dist.all_reduce(squared, op=dist.ReduceOp.SUM, group=group)
    return squared**0.5
