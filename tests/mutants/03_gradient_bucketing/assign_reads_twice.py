"""Iterates over the parameters twice: an iterator is already exhausted the second time.

caught by: assign_buckets · any iterable
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    if not any(parameter.requires_grad for parameter in parameters):
        return []
    return right.assign_buckets(parameters, bucket_cap_mb, first_bucket_mb)
