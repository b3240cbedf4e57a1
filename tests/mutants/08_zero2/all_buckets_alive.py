"""Does not make buckets wait for each other, so all of them are allocated by the end of backward.

caught by: ZeRO2 · peak
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for bucket in self.buckets:
            bucket.previous = None
