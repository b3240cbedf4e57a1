"""Reduces around a ring, whose later steps run in wait(), and uses offsets instead of a list of views."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from solutions import zero2 as lab
from solutions.zero1 import FlatParameter


class _Ring:
    """A ring reduce-scatter. Step k passes on to the right what step k − 1 received, plus this rank's own shard."""

    def __init__(self, flat, group):
        self.rank, self.size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.shards = flat.view(self.size, -1)
        self.arrived = torch.empty_like(self.shards[0])
        self.works = self._pass(1) if self.size > 1 else []

    def _pass(self, step):
        outgoing = self.shards[(self.rank - step) % self.size]
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ops = [
            dist.P2POp(dist.irecv, self.arrived, group=self.group, group_peer=left),
            dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=right),
        ]
        return dist.batch_isend_irecv(ops)

    def wait(self):
        for step in range(1, self.size):
            for work in self.works:
                work.wait()
            self.shards[(self.rank - step - 1) % self.size] += self.arrived
            if step + 1 < self.size:
                self.works = self._pass(step + 1)
        return self.shards[self.rank].clone()


class ShardedBucket:
    previous = None

    def __init__(self, flat_parameter):
        self.flat_parameter, self.layout = flat_parameter, flat_parameter.layout
        self.starts = [0]
        for parameter in self.parameters:
            self.starts.append(self.starts[-1] + parameter.numel())
        self._reset()

    @property
    def parameters(self):
        return self.flat_parameter.layout.parameters

    def _reset(self):
        self.flat = self.views = self.in_flight = None

    def pack(self, index):
        if self.flat is None:
            self.flat = torch.zeros_like(self.flat_parameter.flat_param)
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            if gradient.grad_fn is not None:
                parameter.grad = gradient
                raise RuntimeError("create_graph: gradients of gradients cannot be sent")
            self.flat[self.starts[index] : self.starts[index + 1]] = gradient.reshape(-1)

    def launch(self):
        if self.previous:
            self.previous.wait()
        self.in_flight = _Ring(self.flat, self.layout.group)

    def wait(self):
        if self.in_flight is not None:
            mean = self.in_flight.wait() / dist.get_world_size(self.layout.group)
            self._reset()
            shard = self.flat_parameter.shard
            mean = mean.to(shard.dtype)
            shard.grad = mean if shard.grad is None else shard.grad + mean


class ZeRO2(lab.ZeRO2):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        nn.Module.__init__(self)
        self.module, self.synced, self.buckets = module, False, []
        lab.broadcast_state(module, group)
        for parameters in lab.assign_buckets(module.parameters(), bucket_cap_mb):
            bucket = ShardedBucket(FlatParameter(parameters, group))
            if self.buckets:
                bucket.previous = self.buckets[-1]
            self.buckets.append(bucket)
        self.sync = lab.GradientSync(self.buckets)
        flatten = partial(lab.flat_parameters_of, self.buckets)
        self.optimizer = lab.ShardedOptimizer(list(module.parameters()), optimizer_cls, flatten, group, **defaults)
