"""Sends gradients in float16 to save bytes, and loses what float16 cannot hold.

caught by: ManualDDP · values
"""

import torch

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                small = gradient.half()
                right.mean_over_ranks_(small, self.group)
                parameter.grad = small.to(parameter.dtype)
