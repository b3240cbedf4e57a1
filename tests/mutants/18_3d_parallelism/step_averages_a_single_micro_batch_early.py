"""Averages during backward if there is one micro-batch, before stages add up the gradients of a tied parameter.

caught by: Parallel3D · awkward models
"""

import contextlib

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def step(self, inputs, targets):
        own = self.own_part(inputs), self.own_part(targets)
        if self.zero_stage == 0:
            several = self.pipeline.micro_batches > 1
            with self.replica.no_sync() if several else contextlib.nullcontext():
                loss = self.pipeline.step(*own)
            self.replica.finish_gradient_sync()
        else:
            loss = self.pipeline.step(*own)
        dist.all_reduce(loss, group=self.dp_group)
        return loss / self.replicas
