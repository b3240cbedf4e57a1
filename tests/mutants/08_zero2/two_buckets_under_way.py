"""Waits for the bucket before the one before: two travel while a third fills.

caught by: ZeRO2 · peak
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for number, bucket in enumerate(self.buckets):
            bucket.before = self.buckets[number - 2] if number > 1 else None
