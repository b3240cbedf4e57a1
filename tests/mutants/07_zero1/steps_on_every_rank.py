"""Gives the whole flat_param to each rank's inner optimizer, so the state is not sharded, although only the rank's
shard is all-gathered.

caught by: ZeRO1 · memory
"""

from torch import nn

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.full = [nn.Parameter(each.flat_param) for each in self.flat_parameters]
        self.inner.param_groups[-1]["params"] = self.full[-1:]

    def reduce_gradients(self):
        super().reduce_gradients()
        for full, gradients in zip(self.full, self.gradients, strict=True):
            full.grad = gradients.flat
