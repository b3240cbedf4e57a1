"""Puts parameters of different dtypes into the same bucket.

caught by: assign_buckets · dtypes
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets, room = [], -1
    for parameter in reversed([each for each in parameters if each.requires_grad]):
        if parameter.nbytes > room:
            room = (bucket_cap_mb if buckets else min(first_bucket_mb, bucket_cap_mb)) * right.MB
            buckets.append([])
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets
