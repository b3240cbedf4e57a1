"""Launches a bucket without packing zeros for missing gradients.

caught by: GradientReducer · missing gradients
"""

from solutions import zero3 as right


class GradientReducer(right.GradientReducer):
    def reduce(self, buckets):
        for bucket in buckets:
            self.missing[bucket] = set()
        super().reduce(buckets)
