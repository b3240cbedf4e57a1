"""Averages gradients in float16 to save bytes: values outside its range and precision are lost.

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
