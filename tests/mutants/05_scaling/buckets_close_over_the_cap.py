"""Closes a bucket after the gradient with which it reaches the cap, as torch's DDP does.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets = []
    for ready_s, size in gradients:
        if buckets and buckets[-1][1] < cap_bytes:
            size += buckets.pop()[1]
        buckets.append((ready_s, size))
    return buckets
