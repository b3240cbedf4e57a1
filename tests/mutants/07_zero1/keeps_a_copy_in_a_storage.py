"""Keeps a full copy of the parameters in storages without a tensor.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        self.undo = [each.flat_param.clone().untyped_storage() for each in self.flat_parameters]
        return loss
