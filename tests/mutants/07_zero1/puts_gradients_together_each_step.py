"""Concatenates the gradients into a second copy in every step.

caught by: ZeRO1 · memory
"""

from unittest import mock

import torch

from solutions import zero1 as right
from solutions.async_collectives import reduce_scatter_


class _Gradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is None:
            parameters = self.layout.parameters
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            missing = self.flat.numel() - flat.numel()
            flat = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
            shard = reduce_scatter_(flat, self.layout.group).clone()
            self.flat_parameter.shard.grad = shard / (self.flat.numel() // shard.numel())


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        with mock.patch.object(right, "FlatGradients", _Gradients):
            return super()._flatten(parameters)
