"""Closes a bucket only after it has exceeded its cap, as torch does.

caught by: assign_buckets · buckets
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets, filling, full = [], {}, {}
    for parameter in reversed(list(parameters)):
        if parameter.requires_grad:
            kind = (parameter.dtype, parameter.device)
            cap = (bucket_cap_mb if kind in full else min(first_bucket_mb, bucket_cap_mb)) * right.MB
            if kind not in filling:
                filling[kind] = []
                buckets.append(filling[kind])
            filling[kind].append(parameter)
            if sum(each.nbytes for each in filling[kind]) >= cap:
                full[kind] = filling.pop(kind)
    return buckets
