"""Waits in launch(), through the future of the handle.

caught by: Bucket · waits
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def launch(self):
        super().launch()
        self.handle.get_future().wait()


BucketedDDP = right.BucketedDDP
