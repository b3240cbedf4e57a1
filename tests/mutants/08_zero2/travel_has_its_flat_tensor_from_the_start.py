"""Makes its flat tensor when it is built: all buckets are there before backward begins.

caught by: TravellingGradients · memory
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def __init__(self, home):
        super().__init__(home)
        self._make()

    def _make(self):
        self.flat = self.home.new_flat()
        self.slices = self.home.slices_of(self.flat)

    def wait(self):
        super().wait()
        self._make()
