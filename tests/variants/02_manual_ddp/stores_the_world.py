"""Stores the group of all ranks where it gets no group, copies what it receives, and draws the order in set_epoch()."""

import torch
import torch.distributed as dist
from torch import nn


def mean_over_ranks_(tensor, group=None):
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    tensor.copy_(total / dist.get_world_size(group))


def broadcast_state(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        received = tensor.detach().clone()
        dist.broadcast(received, group=group, group_src=0)
        with torch.no_grad():
            tensor.copy_(received)


def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean_over_ranks_(gradient, group)
            parameter.grad = gradient


class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        self.module = module
        self.group = group or dist.group.WORLD
        broadcast_state(module, self.group)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self):
        average_gradients(self.module, self.group)


class ShardedSampler:
    def __init__(self, length, rank, world_size, shuffle=True, seed=0):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.order = list(range(self.length))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(1_000_003 * epoch + self.seed)
            self.order = torch.randperm(self.length, generator=generator).tolist()

    def __len__(self):
        return -(-self.length // self.world_size)

    def __iter__(self):
        for step in range(len(self)):
            yield self.order[(step * self.world_size + self.rank) % self.length]


def average_gradients_weighted(module, samples, group=None):
    device = next(module.parameters()).device
    total = torch.tensor([samples], device=device)
    dist.all_reduce(total, group=group)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad *= samples
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= total.item()
