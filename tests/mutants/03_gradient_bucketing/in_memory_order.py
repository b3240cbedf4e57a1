"""Packs elements in memory order, which is a different order for channels_last tensors.

caught by: BucketedDDP · values
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                size = parameter.grad.numel()
                parameter.grad = parameter.grad.as_strided((size,), (1,)).view(parameter.shape)
        super().finish_gradient_sync()
