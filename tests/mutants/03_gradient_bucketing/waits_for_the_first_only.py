"""Waits for the first bucket at most and assumes that the others are complete.

caught by: BucketedDDP · in flight
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
        for bucket in self.buckets[1:]:
            bucket.launch()
        self.buckets[0].launch()
        if len(self.buckets) == 1:
            self.buckets[0].wait()
