"""Reduces bf16 gradients in float32: more precise, at twice the bytes.

caught by: ZeRO1 · bf16
"""

from unittest import mock

import torch
import torch.distributed as dist

from solutions import zero1 as right
from solutions.async_collectives import reduce_scatter_


class _Gradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is None:
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                view.copy_(0 * view if parameter.grad is None else parameter.grad)
                parameter.grad = view
            wide = self.flat.to(torch.promote_types(self.flat.dtype, torch.float32))
            mean = reduce_scatter_(wide, self.layout.group) / dist.get_world_size(self.layout.group)
            self.flat_parameter.shard.grad = mean.to(self.flat.dtype)


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        with mock.patch.object(right, "FlatGradients", _Gradients):
            return super()._flatten(parameters)
