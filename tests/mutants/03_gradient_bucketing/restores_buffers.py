"""Restores all buffers after each forward: the running statistics of BatchNorm never change.

caught by: BucketedDDP · values
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def forward(self, *inputs, **kwargs):
        before = [buffer.clone() for buffer in self.module.buffers()]
        output = super().forward(*inputs, **kwargs)
        for buffer, value in zip(self.module.buffers(), before, strict=True):
            buffer.data.copy_(value)
        return output
