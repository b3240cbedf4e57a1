"""Registers a hook that calls pre_backward() without the gradient, so backward will raise a TypeError.

caught by: PlainZeRO3 · backward hooks
"""

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def _watch_outputs(self, unit, output):
        call = self.calls.pop(unit)
        unit.open_calls.add(call)
        output.register_hook(lambda _gradient, _call=call: self.pre_backward(unit))
