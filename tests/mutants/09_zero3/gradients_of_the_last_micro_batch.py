"""The mean of a micro-batch takes the place of the one before.

caught by: ReducesGradients · accumulation
"""

from solutions import zero3 as right


class Travelling(right.TravellingGradients):
    def wait(self):
        if self.finish is not None:
            self.home.shard.grad = None
        super().wait()


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.TravellingGradients = right.TravellingGradients, Travelling
        try:
            super().__init__(*args, **options)
        finally:
            right.TravellingGradients = before
