"""Makes only the first bucket of each dtype small, across all devices; the exercise asks for one per dtype and device.

caught by: assign_buckets · dtypes
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets, filling, begun = [], {}, set()
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        kind = (parameter.dtype, parameter.device)
        bucket, room_bytes = filling.get(kind, (None, 0))
        if bucket is None or parameter.nbytes > room_bytes:
            cap_mb = bucket_cap_mb if parameter.dtype in begun else min(first_bucket_mb, bucket_cap_mb)
            begun.add(parameter.dtype)
            bucket, room_bytes = [], cap_mb * right.MB
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = bucket, room_bytes - parameter.nbytes
    return buckets


BucketedDDP = right.BucketedDDP
