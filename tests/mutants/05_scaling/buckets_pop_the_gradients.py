"""Takes the gradients out of the caller's list, so the next cap finds none.

caught by: buckets_of · buckets
"""


def buckets_of(gradients, cap_bytes):
    buckets = []
    while gradients:
        ready_s, size_bytes = gradients.pop(0)
        if buckets and buckets[-1][1] + size_bytes <= cap_bytes:
            size_bytes += buckets.pop()[1]
        buckets.append((ready_s, size_bytes))
    return buckets
