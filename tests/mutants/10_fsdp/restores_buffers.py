"""Restores all buffers after each forward: the running statistics of BatchNorm never change.

caught by: ZeRO3 · awkward models
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        before = [buffer.clone() for buffer in self.module.buffers()]
        output = super().forward(*inputs, **kwargs)
        for buffer, value in zip(self.module.buffers(), before, strict=True):
            buffer.data.copy_(value)
        return output
