"""Cheats by running the whole optimizer on every rank after an all-reduce.

caught by: ZeRO1 · memory
"""

import torch.distributed as dist


def ZeRO1(params, optimizer_cls, group=None, **defaults):  # noqa: N802
    class Everything(optimizer_cls):
        def step(self, closure=None):
            for parameter in (p for each in self.param_groups for p in each["params"]):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= dist.get_world_size(group)
            return super().step(closure)

    return Everything(params, **defaults)
