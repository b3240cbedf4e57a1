"""Ignores a second gradient, which is then added to a bucket that may be in flight.

caught by: GradientSync · second gradient
"""

from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        if index in self.queue.missing[bucket_index]:
            super().on_gradient(bucket_index, index)
