"""Its hooks hold the wrapper: thrown away, it still sends when its module's backward runs.

caught by: OverlappedDDP · lives
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _watch_gradients(self):
        super()._watch_gradients()
        right.on_gradients(list(self._place_of), self._hold_me)

    def _hold_me(self, parameter):
        pass
