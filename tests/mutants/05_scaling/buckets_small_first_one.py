"""Gives the first bucket a smaller cap, as chapter 03 does.

caught by: buckets_of · buckets
"""

from solutions import scaling as right


def buckets_of(gradients, cap_bytes):
    first = right.buckets_of(gradients, min(cap_bytes, 2**20))[0]
    count, total = 0, 0
    while total < first[1]:
        total += gradients[count][1]
        count += 1
    return [first, *right.buckets_of(gradients[count:], cap_bytes)]
