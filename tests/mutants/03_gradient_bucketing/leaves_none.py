"""Contributes zeros for a missing gradient but sets it back to None: this rank does not step with the mean.

caught by: BucketedDDP · unused on one rank
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        unused = [p for p in self.module.parameters() if p.grad is None]
        super().finish_gradient_sync()
        for parameter in unused:
            parameter.grad = None
