"""Keeps all full gradients until the end of backward and reduces them then.

caught by: ZeRO3 · memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_backward(self, unit, call):
        unit.open_calls.discard(call)
        if not unit.open_calls:
            unit.reshard()
