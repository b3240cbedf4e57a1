"""Keeps a full copy of the parameters in Python strings.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        self.kept = [each.flat_param.float().cpu().numpy().tobytes().decode("latin-1") for each in self.flat_parameters]
        return loss
