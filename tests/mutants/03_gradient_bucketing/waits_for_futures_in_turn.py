"""Waits for each bucket, through its future, before it packs the next.

caught by: BucketedDDP · in flight
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            bucket.launch()
            bucket.handle.get_future().wait()
