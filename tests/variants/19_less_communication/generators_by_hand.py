"""Quantizes in place and in float64, and drives the generator by send() and StopIteration."""

import torch

from solutions.bucketed_ddp import Bucket
from solutions.compression import Int8, PowerSGD, TopK  # noqa: F401

BLOCK = 256


def quantize(values):
    blocks = values.double().clone().unflatten(-1, (values.shape[-1] // BLOCK, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).to(torch.float32)
    scales[scales < torch.finfo(torch.float32).tiny] = torch.finfo(torch.float32).tiny
    blocks.div_(scales.double().unsqueeze(-1)).round_().clamp_(-127, 127)
    return blocks.flatten(-2).char(), scales


def dequantize(integers, scales):
    values = integers.to(torch.float32)
    values.unflatten(-1, (-1, BLOCK)).mul_(scales[..., None])
    return values


class CompressedBucket(Bucket):
    def __init__(self, parameters, group, compressor):
        super().__init__(parameters, group)
        self.compressor, self.memory = compressor, {}
        self.unsent = torch.zeros(len(self.flat), dtype=torch.promote_types(self.flat.dtype, torch.float32))
        self.unsent = self.unsent.to(self.flat.device)
        self.stages = self.handle = None

    def launch(self):
        self.unsent.copy_(self.unsent + self.flat)
        self.stages = self.compressor.exchange(self)
        self.handle = self.stages.send(None)

    def wait(self):
        if self.handle is None:
            raise RuntimeError("no exchange is in flight")
        try:
            while True:
                self.handle.wait()
                self.handle = self.stages.send(None)
        except StopIteration:
            self.stages = self.handle = None
