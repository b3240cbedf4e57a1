"""Counts an MB as 10⁶ bytes instead of 2²⁰.

caught by: assign_buckets · units
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    decimal = 10**6 / right.MB
    return right.assign_buckets(parameters, bucket_cap_mb * decimal, first_bucket_mb * decimal)
