"""Assigns parameters in forward order, so the first bucket is completed last.

caught by: assign_buckets · buckets
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    return right.assign_buckets(reversed(list(parameters)), bucket_cap_mb, first_bucket_mb)
