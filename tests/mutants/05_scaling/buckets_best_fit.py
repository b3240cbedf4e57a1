"""Puts a gradient into any bucket that has space for it.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets = []
    for ready_s, size in gradients:
        for index, (_, filled) in enumerate(buckets):
            if filled + size <= cap_bytes:
                buckets[index] = (ready_s, filled + size)
                break
        else:
            buckets.append((ready_s, size))
    return buckets
