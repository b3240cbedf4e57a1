"""Skips parameters whose grad is None on this rank: the other ranks wait, or pair the collective with another
parameter's.

caught by: average_gradients · unused on one rank
"""

from solutions import manual_ddp as right


def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.grad is not None:
            right.mean_over_ranks_(parameter.grad, group)


class ManualDDP(right.ManualDDP):
    def finish_gradient_sync(self):
        average_gradients(self.module, self.group)
