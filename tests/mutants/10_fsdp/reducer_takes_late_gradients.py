"""Packs a gradient into a bucket that is in flight.

caught by: GradientReducer · second gradient
"""

from solutions import zero3 as right


class GradientReducer(right.GradientReducer):
    def reduce(self, buckets):
        super().reduce(buckets)
        for bucket in buckets:
            self.missing[bucket] = set(range(len(bucket.parameters)))
