"""Averages in a hook during each backward: the values are right, but every micro-batch is communicated.

caught by: ManualDDP · wire
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def __init__(self, module, group=None):
        super().__init__(module, group)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter):
        right.mean_over_ranks_(parameter.grad, self.group)

    def finish_gradient_sync(self):
        pass
