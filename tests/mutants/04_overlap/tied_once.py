"""Makes .grad a view of the bucket only at construction: after zero_grad(), the bucket is never updated.

caught by: OverlappedDDP · values
"""

from solutions import overlapped_ddp as right


class _Bucket(right.Bucket):
    def pack(self, index):
        if self.parameters[index].grad is self.slices[index]:
            super().pack(index)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        for bucket in self.buckets:
            bucket.__class__ = _Bucket
            for parameter, piece in zip(bucket.parameters, bucket.slices, strict=True):
                parameter.grad = piece
