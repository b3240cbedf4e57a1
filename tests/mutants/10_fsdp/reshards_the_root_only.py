"""Leaves units whose inputs need no gradient unsharded after backward.

caught by: ZeRO3 · after backward
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def finish_gradient_sync(self):
        self.reducer.finish()
        self.root.reshard()
        for unit in self.units:
            unit.open_calls.clear()
        self.pending = False
