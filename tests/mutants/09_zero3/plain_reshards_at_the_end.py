"""Keeps all units unsharded until the end of backward.

caught by: PlainZeRO3 · memory
"""

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def post_backward(self, unit, call):
        unit.open_calls.discard(call)
        self.reducer.reduce(self.buckets_of[unit])
