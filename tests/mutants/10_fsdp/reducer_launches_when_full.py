"""Launches a bucket when it is full instead of in reduce().

caught by: GradientReducer · plain backward
"""

from solutions import zero3 as right


class GradientReducer(right.GradientReducer):
    def on_gradient(self, bucket_index, index):
        super().on_gradient(bucket_index, index)
        if not self.missing[self.buckets[bucket_index]]:
            self.reduce([self.buckets[bucket_index]])
