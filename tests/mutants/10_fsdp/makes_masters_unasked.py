"""Converts the shards of a bfloat16 model to float32.

caught by: ZeRO3 · bf16
"""

import torch
from torch import nn

from solutions import units
from solutions import zero3 as right


class Flat(units.ShardedFlatParameter):
    def __init__(self, *args):
        super().__init__(*args)
        if self.shard.dtype == torch.bfloat16:
            self.shard = nn.Parameter(self.shard.detach().float(), self.shard.requires_grad)


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        before, units.ShardedFlatParameter = units.ShardedFlatParameter, Flat
        try:
            super().__init__(*args, **options)
        finally:
            units.ShardedFlatParameter = before
