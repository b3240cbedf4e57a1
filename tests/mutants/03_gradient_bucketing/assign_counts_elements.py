"""Compares the number of elements with a cap in bytes.

caught by: assign_buckets · buckets
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    parameters = list(parameters)
    size = parameters[0].element_size() if parameters else 1
    return right.assign_buckets(parameters, bucket_cap_mb * size, first_bucket_mb * size)
