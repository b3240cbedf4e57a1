"""Broadcasts trainable parameters only: the frozen ones, and with them the outputs, differ between ranks.

caught by: ZeRO1 · same start
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        return super()._flatten([parameter for parameter in parameters if parameter.requires_grad])
