"""Gradients that have been sent are not let go of.

caught by: ReducesGradients · memory
"""

from solutions import zero3 as right


class Travelling(right.TravellingGradients):
    def launch(self):
        super().launch()
        self.sent = self.flat


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.TravellingGradients = right.TravellingGradients, Travelling
        try:
            super().__init__(*args, **options)
        finally:
            right.TravellingGradients = before
