"""Keeps a full copy of the parameters in one large integer for each flat parameter.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        copies = [each.flat_param.float().cpu().numpy().tobytes() for each in self.flat_parameters]
        self.kept = [int.from_bytes(each, "little") for each in copies]
        return loss
