"""Divides first, launches all all-reduces (last parameter first), and waits at the end."""

import torch
import torch.distributed as dist
from torch import nn


def mean_over_ranks_(tensor, group=None):
    tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, group=group)


def broadcast_state(module, group=None):
    root = dist.get_global_rank(group, 0) if group is not None else 0
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor, root, group)


def average_gradients(module, group=None):
    handles = []
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        if parameter.grad is None:
            parameter.grad = parameter.new_zeros(parameter.shape)
        parameter.grad.div_(dist.get_world_size(group))
        handles.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for handle in handles:
        handle.wait()


class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        self.add_module("module", module)
        self.group = group
        broadcast_state(self.module, group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_sync(self):
        average_gradients(self.module, self.group)


class ShardedSampler:
    """Pads the order to a full table with one column per rank and reads its column. Shuffles with `random`."""

    def __init__(self, length, rank, world_size, shuffle=True, seed=0):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return (self.length + self.world_size - 1) // self.world_size

    def __iter__(self):
        order = list(range(self.length))
        if self.shuffle:
            import random

            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        while len(order) < len(self) * self.world_size:
            order += order[: len(self) * self.world_size - len(order)]
        yield from order[self.rank :: self.world_size]


def average_gradients_weighted(module, samples, group=None):
    total = torch.tensor([float(samples)])
    dist.all_reduce(total, group=group)
    trainable = [p for p in module.parameters() if p.requires_grad]
    for parameter in trainable:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.mul_(samples)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(total.item())
