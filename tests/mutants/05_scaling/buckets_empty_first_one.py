"""Closes an empty bucket before a first gradient that is larger than the cap.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets = [(0.0, 0)]
    for ready_s, size_bytes in gradients:
        if buckets[-1][1] + size_bytes <= cap_bytes:
            size_bytes += buckets.pop()[1]
        buckets.append((ready_s, size_bytes))
    return buckets
