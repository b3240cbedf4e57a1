"""Keeps what is unsent in bf16, which rounds small values away.

caught by: CompressedBucket · buckets
"""

import torch

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def __init__(self, parameters, group, compressor):
        super().__init__(parameters, group, compressor)
        self.unsent = torch.zeros_like(self.flat)
