"""Packs with a list of narrow() views, divides when it waits, and adds the mean with its own dtype."""

import torch
import torch.distributed as dist

from solutions.async_collectives import launch_reduce_scatter
from solutions.flat import FlatParameter  # noqa: F401
from solutions.zero2 import ZeRO2  # noqa: F401


class ShardedBucket:
    def __init__(self, flat_parameter):
        self.flat_parameter, self.layout, self.previous = flat_parameter, flat_parameter.layout, None
        self.parameters = list(flat_parameter.layout.parameters)
        self.flat = self.views = self.in_flight = None

    def _allocate(self):
        if self.flat is None:
            self.flat, self.views, start = self.layout.new_flat(), [], 0
            for parameter in self.parameters:
                self.views.append(self.flat.narrow(0, start, parameter.numel()).view_as(parameter))
                start += parameter.numel()

    def pack(self, index):
        gradient = self.parameters[index].grad
        if gradient is not None and gradient.requires_grad:
            raise RuntimeError("create_graph=True is not supported")
        self._allocate()
        if gradient is None:
            torch.zero_(self.views[index])
        else:
            self.views[index][...] = gradient
        self.parameters[index].grad = None

    def launch(self):
        for earlier in filter(None, [self.previous]):
            earlier.wait()
        self.in_flight = launch_reduce_scatter(self.flat, group=self.layout.group)

    @torch.no_grad()
    def wait(self):
        handle, self.in_flight = self.in_flight, None
        if handle is None:
            return
        shard = self.flat_parameter.shard
        mean = handle.wait() / dist.get_world_size(self.layout.group)
        shard.grad = torch.zeros_like(shard) if shard.grad is None else shard.grad
        shard.grad.add_(mean)
        self.flat = self.views = None
