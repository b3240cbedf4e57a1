"""Includes a tied parameter once per name.

caught by: BucketedDDP · wire
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        every = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
        self.buckets = [right.Bucket(parameters, group) for parameters in right.assign_buckets(every, bucket_cap_mb)]

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            own = [None if p.grad is None else p.grad.clone() for p in bucket.parameters]
            for index, gradient in enumerate(own):
                bucket.parameters[index].grad = gradient
                bucket.pack(index)
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
