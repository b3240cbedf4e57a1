"""Gradients are added up, and not divided.

caught by: ReducesGradients · values
"""

import torch.distributed as dist

from solutions import zero3 as right


class Travelling(right.TravellingGradients):
    def launch(self):
        super().launch()
        finish = self.finish
        self.finish = lambda: finish().mul_(dist.get_world_size(self.home.group))


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.TravellingGradients = right.TravellingGradients, Travelling
        try:
            super().__init__(*args, **options)
        finally:
            right.TravellingGradients = before
