"""Clears the optimizer's state while saving it, so the next step starts without state.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        gathered = super().state_dict(to)
        self.inner.state.clear()
        return gathered
