"""Returns early if there is nothing to send, so the other ranks wait forever.

caught by: BucketedDDP · no backward
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        if any(p.grad is not None and p.grad.any() for p in self.module.parameters()):
            super().finish_gradient_sync()
