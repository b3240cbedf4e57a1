"""Moves the state out of the optimizer as it gathers it: the next step starts with none.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        gathered = super().state_dict(to)
        self.inner.state.clear()
        return gathered
