"""Keeps a bucket only when the next one begins, so the last one is lost.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets, ready_s, filled = [], 0.0, 0
    for now_s, size in gradients:
        if filled and filled + size > cap_bytes:
            buckets.append((ready_s, filled))
            filled = 0
        ready_s, filled = now_s, filled + size
    return buckets
