"""Starts a new bucket whenever the dtype changes: parameters with alternating dtypes get one bucket each.

caught by: assign_buckets · dtypes
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    runs = []
    for parameter in reversed(list(parameters)):
        if runs and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device):
            runs[-1].append(parameter)
        else:
            runs.append([parameter])
    return [b for run in runs for b in right.assign_buckets(run[::-1], bucket_cap_mb, first_bucket_mb)]
