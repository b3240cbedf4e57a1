"""Waits only for the bucket before the previous one: two are in flight while a third is packed.

caught by: ZeRO2 · peak
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for index, bucket in enumerate(self.buckets):
            bucket.previous = self.buckets[index - 2] if index > 1 else None
