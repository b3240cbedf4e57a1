"""Reserves space for frozen parameters, which have no gradient.

caught by: assign_buckets · trainable
"""

from solutions import bucketed_ddp as right


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    buckets, room = [], {}
    for parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device)
        if parameter.nbytes > room.get(kind, (None, -1))[1]:
            buckets.append([])
            cap = bucket_cap_mb if kind in room else min(first_bucket_mb, bucket_cap_mb)
            room[kind] = buckets[-1], cap * right.MB
        room[kind][0].append(parameter)
        room[kind] = room[kind][0], room[kind][1] - parameter.nbytes
    return buckets
