"""Every rank gets every sum, and takes its part.

caught by: ReducesGradients · wire
"""

import torch.distributed as dist

from solutions import zero3 as right


class Travelling(right.TravellingGradients):
    def launch(self):
        dist.all_reduce(self.flat, group=self.home.group)
        self.finish = lambda: self.home.own(self.flat).clone()


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.TravellingGradients = right.TravellingGradients, Travelling
        try:
            super().__init__(*args, **options)
        finally:
            right.TravellingGradients = before
