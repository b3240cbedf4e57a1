"""All-reduces every bucket and keeps the rank's shard, which sends twice the bytes.

caught by: ZeRO3 · wire
"""

from types import SimpleNamespace

import torch.distributed as dist

from solutions import zero3 as right


class Bucket(right.UnitBucket):
    def launch(self):
        dist.all_reduce(self.flat, group=self.layout.group)
        own = self.layout.shard_of(self.flat).clone()
        self.in_flight = SimpleNamespace(wait=lambda: own)


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.UnitBucket = right.UnitBucket, Bucket
        try:
            super().__init__(*args, **options)
        finally:
            right.UnitBucket = before
