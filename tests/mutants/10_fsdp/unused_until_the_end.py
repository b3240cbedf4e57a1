"""Reduces a unit with missing gradients only at the end of backward.

caught by: ZeRO3 · unused on one rank
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_backward(self, unit, call):
        unit.open_calls.discard(call)
        if not unit.open_calls:
            self.reducer.reduce([bucket for bucket in self.buckets_of[unit] if not self.reducer.missing[bucket]])
            unit.reshard()
