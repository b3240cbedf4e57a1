"""Its hooks hold the wrapper: thrown away, it still sends when its module's backward runs.

caught by: OverlappedDDP · lives
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _watch_gradients(self):
        super()._watch_gradients()
        on_gradient, self._on_gradient = self._on_gradient, lambda parameter: None  # of the weak ones
        right.on_gradients(list(self._place_of), on_gradient)
