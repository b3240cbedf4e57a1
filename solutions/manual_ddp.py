# Built by `make notebooks` from source/02_manual_ddp/lab.py: edit that, not this.
"""Data parallelism by hand: replicate the module, give each rank its own samples, and average the gradients."""

import math
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from shared import guards


def mean_over_ranks_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace a tensor, in place, with its mean over the ranks of the group.

    Communication: one all-reduce. As a ring, it sends 2(N−1)/N of the tensor's bytes per rank.
    """
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def broadcast_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy parameters and buffers from the first rank of the group to all its ranks.

    Communication: one broadcast per parameter and buffer.
    """
    for tensor in chain(module.parameters(), module.buffers()):
        with guards.contiguous(tensor.detach()) as packed:
            dist.broadcast(packed, group=group, group_src=0)


def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average the gradients of all trainable parameters over the group.

    A gradient that is None on this rank counts as zeros, so that all ranks call the same collectives.

    Communication: one all-reduce per trainable parameter.
    """
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, guards.UNUSED)  # [Note: negative zeros]
        mean_over_ranks_(parameter.grad, group)


@guards.guarded(guards.PerParameter)
class ManualDDP(nn.Module):
    """Trains a replica of a module on each rank of the group, as one process would train it on the full batch.

    Call finish_gradient_sync() right after backward(), before you clip gradients and before the step. The wrapped
    module is available as `.module`. The gradients equal those of one process if the loss is a mean over samples, every
    rank has equally many samples, and the module processes each sample independently of the others. If no rank has used
    a parameter, its gradient is zeros, or None if you send −0.0 for None (exercise 2.3).

    Communication: one broadcast per parameter and buffer when built, and one all-reduce per trainable parameter in each
        step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.group = group
        broadcast_state(module, group)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average the gradients that backward() has accumulated since zero_grad()."""
        average_gradients(self.module, self.group)


def average_gradients_weighted(module: nn.Module, samples: int, group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over ranks with different numbers of samples, weighting each rank by its number.

    Args:
        module: The module whose gradients to average.
        samples: The number of samples in this rank's batch.
        group: The ranks to average over. By default, all ranks.

    Communication: one all-reduce of one element, then one per trainable parameter.
    """
    device = next(module.parameters()).device
    total_samples = torch.tensor([samples], dtype=torch.float64, device=device)
    dist.all_reduce(total_samples, group=group)
    weight = samples / total_samples.item()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= weight
        dist.all_reduce(parameter.grad, group=group)


class ShardedSampler:
    """Yields the sample indices of this rank: all ranks draw the same order, and each takes every world_size-th index.

    Every rank yields equally many indices. If world_size does not divide the length, the first ones are repeated.
    """

    def __init__(self, length: int, rank: int, world_size: int, shuffle: bool = True, seed: int = 0):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the shuffled order depends. Without this call, every epoch has the same order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.length / self.world_size)

    def __iter__(self):
        order = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator)
        # Positions past the end wrap around, so that every rank gets len(self) samples.
        positions = torch.arange(self.rank, len(self) * self.world_size, self.world_size)
        return iter(order[positions % self.length].tolist())
