"""Broadcasts the parameters at construction but not the buffers.

caught by: ZeRO2 · same start
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, module, *args, **kwargs):
        own = [buffer.clone() for buffer in module.buffers()]
        super().__init__(module, *args, **kwargs)
        for buffer, before in zip(module.buffers(), own, strict=True):
            buffer.copy_(before)
