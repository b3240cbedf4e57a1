"""Splits into blocks by split(), and turns the rest of the generator into a closure that wait() calls."""

import functools

import torch

from solutions.bucketed_ddp import Bucket
from solutions.compression import Int8, PowerSGD, TopK  # noqa: F401

BLOCK = 256
LEAST = 2.0**-126


def _scale(block):
    return block.abs().max(dim=-1, keepdim=True).values.float().div(127).clip(LEAST)


def quantize(values):
    blocks = values.split(BLOCK, dim=-1)
    scales = [_scale(block) for block in blocks]
    integers = [torch.round(block / scale).to(torch.int8) for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(integers, dim=-1), torch.cat(scales, dim=-1)


def dequantize(integers, scales):
    columns = scales.split(1, dim=-1)
    return torch.cat([part * scale for part, scale in zip(integers.split(BLOCK, -1), columns, strict=True)], dim=-1)


class CompressedBucket(Bucket):
    def __init__(self, parameters, group, compressor):
        super().__init__(parameters, group)
        self.compressor, self.memory, self.finish = compressor, {}, None
        self.unsent = torch.zeros_like(self.flat, dtype=torch.promote_types(self.flat.dtype, torch.float32))

    def launch(self):
        torch.add(self.unsent, self.flat, out=self.unsent)
        stages = self.compressor.exchange(self)
        self.finish = functools.partial(self._continue, next(stages), stages)

    @staticmethod
    def _continue(handle, stages):
        handle.wait()
        for later in stages:
            later.wait()

    def wait(self):
        finish, self.finish = self.finish, None
        if finish is None:
            raise RuntimeError("call launch() before wait()")
        finish()
