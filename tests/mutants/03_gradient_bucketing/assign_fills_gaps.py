"""Puts a parameter into any earlier bucket that still has room, out of order.

caught by: assign_buckets · buckets
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets, kinds = [], []
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        for index, bucket in enumerate(buckets):
            is_first = kinds.index(kind) == index if kind in kinds else False
            cap = (min(first_bucket_mb, bucket_cap_mb) if is_first else bucket_cap_mb) * right.MB
            if kinds[index] == kind and sum(p.nbytes for p in bucket) + parameter.nbytes <= cap:
                bucket.append(parameter)
                break
        else:
            buckets.append([parameter])
            kinds.append(kind)
    return buckets
