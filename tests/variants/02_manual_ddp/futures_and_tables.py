"""Waits for futures, replaces .grad by new tensors, and cuts the order of samples from a padded table."""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


def mean_over_ranks_(tensor, group=None):
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    torch.futures.wait_all([future])
    return tensor.mul_(1 / dist.get_world_size(group))


def broadcast_state(module, group=None):
    tensors = {id(tensor): tensor for tensor in (*module.buffers(), *module.parameters())}
    works = [dist.broadcast(tensor.data, group_src=0, group=group, async_op=True) for tensor in tensors.values()]
    for work in works[::-1]:
        work.wait()


def _gradient_of(parameter):
    return torch.zeros_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad.clone()


def average_gradients(module, group=None):
    trained = filter(lambda parameter: parameter.requires_grad, module.parameters())
    for parameter in trained:
        mean = _gradient_of(parameter)
        dist.all_reduce(mean, group=group)
        parameter.grad = mean / dist.get_world_size(group)


class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        nn.Module.__init__(self)
        self.module = module
        broadcast_state(module, group)
        self._average = lambda: average_gradients(module, group)

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    def finish_gradient_sync(self):
        return self._average()

    def __deepcopy__(self, memo):
        import copy

        return type(self)(copy.deepcopy(self.module, memo))


@dataclass
class ShardedSampler:
    length: int
    rank: int
    world_size: int
    shuffle: bool = True
    seed: int = 0
    epoch: int = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        quotient, remainder = divmod(self.length, self.world_size)
        return quotient + bool(remainder)

    def __iter__(self):
        order = list(range(self.length))
        if self.shuffle:
            random.Random(f"{self.seed}, {self.epoch}").shuffle(order)
        padded = order * self.world_size
        rows = [padded[begin : begin + self.world_size] for begin in range(0, self.length, self.world_size)]
        return (row[self.rank] for row in rows)


def average_gradients_weighted(module, samples, group=None):
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    count = torch.full((1,), float(samples), dtype=torch.float64, device=next(module.parameters()).device)
    work = dist.all_reduce(count, group=group, async_op=True)
    gradients = [_gradient_of(parameter) * samples for parameter in parameters]
    work.wait()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        dist.all_reduce(gradient, group=group)
        parameter.grad = gradient.div(count.item())
