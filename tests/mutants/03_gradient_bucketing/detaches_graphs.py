"""Silently detaches gradients that are part of a graph.

caught by: BucketedDDP · graphs
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()
        super().finish_gradient_sync()
