"""Packs zeros for missing gradients, but still accepts these gradients when the bucket is in flight.

caught by: GradientReducer · second gradient
"""

from solutions import zero3 as right


class GradientReducer(right.GradientReducer):
    def reduce(self, buckets):
        for bucket in buckets:
            if bucket not in self.launched:
                for index in sorted(self.missing[bucket]):
                    bucket.pack(index)
                bucket.previous = self.launched[-1] if self.launched else None
                bucket.launch()
                self.launched.append(bucket)
