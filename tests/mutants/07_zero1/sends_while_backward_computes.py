"""Averages each gradient in a hook during backward, and again in the step.

caught by: ZeRO1 · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= dist.get_world_size(self.group)
