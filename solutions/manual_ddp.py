# Built by `make notebooks` from source/02_manual_ddp/lab.py: edit that, not this.
"""Data parallelism by hand: replicate the module, give each rank its samples, average the gradients."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn


def mean_over_ranks_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its mean over the group's ranks.

    Comm: one all_reduce of tensor; a ring sends 2(N−1)/N of its bytes per rank.
    """
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def broadcast_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy parameters and buffers from the group's first rank to all its ranks.

    Comm: one broadcast per tensor.
    """
    for tensor in chain(module.parameters(), module.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average each trainable parameter's gradient over the group.

    A gradient that is None on this rank counts as zeros, so that all ranks make the same calls.

    Comm: one all_reduce per trainable parameter.
    """
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean_over_ranks_(parameter.grad, group)


class ManualDDP(nn.Module):
    """Train a replica of module on each rank of the group as one process would on the full batch.

    The module itself is kept as `.module`.

    Call finish_gradient_sync() after backward() and before the optimizer's step. Exact for losses that are
    means over equally many samples per rank, and for modules that treat each sample on its own.

    Comm: when built, one broadcast per parameter and buffer; per step, one all_reduce per trainable parameter.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.group = group
        broadcast_state(module, group)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average what backward() has accumulated since zero_grad()."""
        average_gradients(self.module, self.group)


class ShardedSampler:
    """Yield this rank's sample numbers: all ranks shuffle alike, then each takes every world_size-th.

    Every rank yields the same number of samples; the first ones come again where the length does not divide.
    """

    def __init__(self, length: int, rank: int, world_size: int, shuffle: bool = True, seed: int = 0):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has; without it every epoch is the same."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.length // self.world_size)

    def __iter__(self):
        order = torch.arange(self.length)
        if self.shuffle:
            draw = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=draw)
        places = torch.arange(self.rank, len(self) * self.world_size, self.world_size)
        return iter(order[places % self.length].tolist())


def average_gradients_weighted(module: nn.Module, samples: int, group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over ranks that had different numbers of samples, each weighted by its share.

    Comm: one all_reduce of one number, then one per trainable parameter.
    """
    device = next(module.parameters()).device
    total = torch.tensor([samples], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    share = samples / total.item()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= share
        dist.all_reduce(parameter.grad, group=group)
