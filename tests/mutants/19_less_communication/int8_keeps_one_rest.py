"""Keeps what is unsent on the compressor, one tensor for each length of a bucket.

caught by: Int8 · two models
"""

import torch

from solutions import compression as right


class Int8(right.Int8):
    def __init__(self):
        self.unsent = {}

    def exchange(self, bucket):
        new = bucket.flat.to(bucket.unsent)
        bucket.unsent = self.unsent.setdefault(len(new), torch.zeros_like(new))
        bucket.unsent += new
        return super().exchange(bucket)
