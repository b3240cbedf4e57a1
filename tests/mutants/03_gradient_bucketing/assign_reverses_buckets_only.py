"""Fills the buckets in forward order and reverses them afterwards, so the boundaries are wrong.

caught by: assign_buckets · buckets
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets = right.assign_buckets(reversed(list(parameters)), bucket_cap_mb, first_bucket_mb)
    return [bucket[::-1] for bucket in buckets[::-1]]
