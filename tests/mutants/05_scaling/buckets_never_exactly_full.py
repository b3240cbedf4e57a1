"""Does not let a bucket be exactly as large as the cap.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets = []
    for ready_s, size in gradients:
        if buckets and buckets[-1][1] + size < cap_bytes:
            size += buckets.pop()[1]
        buckets.append((ready_s, size))
    return buckets
