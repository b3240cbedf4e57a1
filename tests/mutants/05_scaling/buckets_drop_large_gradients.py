"""Leaves out gradients that are larger than the cap.

caught by: buckets_of · buckets
"""

from solutions import scaling as right


def buckets_of(gradients, cap_bytes):
    return right.buckets_of([each for each in gradients if each[1] <= cap_bytes], cap_bytes)
