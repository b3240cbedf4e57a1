"""Adds a bucket to the list only when the next one starts, so the last bucket is lost.

caught by: assign_buckets · buckets
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    return right.assign_buckets(parameters, bucket_cap_mb, first_bucket_mb)[:-1]
