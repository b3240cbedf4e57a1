"""Sums gradients without dividing by the number of ranks.

caught by: ZeRO3 · plain model
"""

from types import SimpleNamespace

import torch.distributed as dist

from solutions import zero3 as right


class Bucket(right.UnitBucket):
    def launch(self):
        super().launch()
        in_flight, size = self.in_flight, dist.get_world_size(self.layout.group)
        self.in_flight = SimpleNamespace(wait=lambda: in_flight.wait().mul_(size))


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.UnitBucket = right.UnitBucket, Bucket
        try:
            super().__init__(*args, **options)
        finally:
            right.UnitBucket = before
