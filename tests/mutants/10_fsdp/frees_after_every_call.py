"""Reshards a unit after the backward of each of its calls, so that it is all-gathered again for the next one.

caught by: ZeRO3 · wire
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_backward(self, unit, call):
        unit.open_calls.discard(call)
        if not unit.open_calls:
            self.reducer.reduce(self.buckets_of[unit])
        unit.reshard()
