"""Averages the parameters instead of their gradients.

caught by: ManualDDP · plain model
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                right.mean_over_ranks_(parameter.data, self.group)
