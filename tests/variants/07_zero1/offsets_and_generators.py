"""Counts offsets by hand, fills by slice assignment, and launches and waits in generators."""

from itertools import accumulate

import torch.distributed as dist
from torch import nn

from solutions import flat
from solutions.async_collectives import launch_all_gather, reduce_scatter_
from solutions.zero1 import ShardedOptimizer, ZeRO1  # noqa: F401


class FlatParameter(flat.FlatParameter):
    def __init__(self, parameters, group=None):
        self.layout = flat.FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, end in zip(parameters, accumulate(sizes), strict=True):
            self.flat_param[end - parameter.numel() : end] = parameter.detach().flatten()
        self._alias_parameters()
        numel, rank = self.layout.shard_shape.numel(), dist.get_rank(group)
        self.shard = nn.Parameter(self.flat_param.narrow(0, rank * numel, numel))

    def launch_all_gather(self):
        return launch_all_gather(self.flat_param, self.shard.detach(), self.layout.group)

    def _alias_parameters(self):
        offset = 0
        for parameter in self.layout.parameters:
            parameter.data = self.flat_param[offset : offset + parameter.numel()].reshape(parameter.shape)
            offset += parameter.numel()


class FlatGradients(flat.FlatGradients):
    def _moved(self):
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            gradient, parameter.grad = parameter.grad, view
            if gradient is not view:
                yield view.fill_(0) if gradient is None else view.copy_(gradient)

    def reduce(self):
        if self.is_reduced():
            return
        sum(1 for _ in self._moved())
        own = reduce_scatter_(self.flat, self.layout.group)
        own /= dist.get_world_size(self.layout.group)
        self.flat_parameter.shard.grad = own
        self.reduced_version = self.views[0]._version
