"""Calls a bucket ready when its first gradient is.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets = []
    for ready_s, size in gradients:
        if buckets and buckets[-1][1] + size <= cap_bytes:
            buckets[-1] = (buckets[-1][0], buckets[-1][1] + size)
        else:
            buckets.append((ready_s, size))
    return buckets
