"""Lets the first bucket exceed `bucket_cap_mb`.

caught by: assign_buckets · first bucket
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    parameters = list(parameters)
    if first_bucket_mb <= bucket_cap_mb:
        return right.assign_buckets(parameters, bucket_cap_mb, first_bucket_mb)
    first, *_ = right.assign_buckets(parameters, first_bucket_mb, first_bucket_mb)
    rest = [p for p in parameters if all(p is not other for other in first)]
    return [first, *right.assign_buckets(rest, bucket_cap_mb, first_bucket_mb)]
