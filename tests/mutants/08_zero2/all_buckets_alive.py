"""No bucket waits for another: by the end of backward all of them are alive.

caught by: ZeRO2 · peak
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for bucket in self.buckets:
            bucket.previous = None
