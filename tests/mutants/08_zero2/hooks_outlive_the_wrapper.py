"""Keeps the wrapper alive through its parameters: after it is deleted, it still communicates.

caught by: ZeRO2 · copies
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for parameter in self.module.parameters():
            parameter.held_by = self
