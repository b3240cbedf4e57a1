"""Launches a bucket whenever backward() has filled it, so every micro-batch is communicated.

caught by: BucketedDDP · wire
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        for bucket in self.buckets:
            bucket.parameters[-1].register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._send(bucket))

    def _send(self, bucket):
        if all(parameter.grad is not None for parameter in bucket.parameters):
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            bucket.launch()

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            if bucket.handle is None:
                for index in range(len(bucket.parameters)):
                    bucket.pack(index)
                bucket.launch()
            bucket.wait()
