# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""Gradient clipping by the norm over all ranks' shards."""

import torch
import torch.distributed as dist


@torch.no_grad()
def clip_shards_(
    gradients: list[torch.Tensor], max_norm: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale this rank's shards of a gradient so that the norm of the whole gradient is at most max_norm.

    Returns:
        The norm before scaling, the same on every rank.

    Communication: one all-reduce of one element.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)  # every parameter is frozen, on all ranks

    def norm_of(gradient: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(gradient.dtype, torch.float64)  # complex128 for a complex one
        return torch.linalg.vector_norm(gradient, dtype=dtype)

    squared_norm = torch.stack([norm_of(gradient) for gradient in gradients]).square().sum()
    dist.all_reduce(squared_norm, group=group)
    norm = squared_norm.sqrt()
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
