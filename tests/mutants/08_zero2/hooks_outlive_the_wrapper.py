"""Hooks hold the wrapper: thrown away, it goes on sending.

caught by: ZeRO2 · lives
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def _watch_gradients(self):
        super()._watch_gradients()
        for parameter in self.module.parameters():
            parameter.held_by = self
