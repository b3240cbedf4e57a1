"""Skips a parameter whose grad is None here, while other ranks wait for it or pair it with another.

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
