"""Silently drops a second gradient that is computed before finish_gradient_sync().

caught by: ZeRO3 · second backward
"""

from solutions import zero3 as right


class Reducer(right.GradientReducer):
    def on_gradient(self, bucket_index, index):
        if index in self.missing[self.buckets[bucket_index]]:
            super().on_gradient(bucket_index, index)


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, right.GradientReducer = right.GradientReducer, Reducer
        try:
            super().__init__(*args, **options)
        finally:
            right.GradientReducer = before
