"""Backward leaves a unit when it enters one inside it.

caught by: ReducesGradients · values
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kin = {unit: {unit} for unit in self.kin}
