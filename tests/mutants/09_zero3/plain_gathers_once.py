"""Keeps every unit unsharded from its forward to its backward.

caught by: PlainZeRO3 · wire
"""

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, reshard_after_forward=False, group=group)
