"""Makes only the very first bucket small instead of the first bucket of each dtype.

caught by: assign_buckets · dtypes
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets, filling = [], {}
    for parameter in reversed(list(parameters)):
        if parameter.requires_grad:
            kind = (parameter.dtype, parameter.device)
            bucket, room = filling.get(kind, (None, 0))
            if bucket is None or parameter.nbytes > room:
                bucket, room = [], (bucket_cap_mb if buckets else min(first_bucket_mb, bucket_cap_mb)) * right.MB
                buckets.append(bucket)
            bucket.append(parameter)
            filling[kind] = bucket, room - parameter.nbytes
    return buckets
