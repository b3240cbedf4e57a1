"""Copies with foreach, divides before the reduce-scatter, and broadcasts before anything is flattened."""

import torch
import torch.distributed as dist
from torch import nn

from solutions import flat, zero1
from solutions.async_collectives import launch_all_gather, launch_reduce_scatter
from solutions.zero1 import ZeRO1  # noqa: F401


class FlatParameter(flat.FlatParameter):
    @torch.no_grad()
    def __init__(self, parameters, group=None):
        self.layout = flat.FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        torch._foreach_copy_(self.layout.views(self.flat_param), [p.detach() for p in parameters])
        self._alias_parameters()
        own = self.layout.shard_of(self.flat_param)
        self.shard = nn.Parameter(own, requires_grad=True)

    def launch_all_gather(self):
        with torch.no_grad():
            return launch_all_gather(shard=self.shard.detach(), flat=self.flat_param, group=self.layout.group)

    def _alias_parameters(self):
        for number, view in enumerate(self.layout.views(self.flat_param)):
            self.layout.parameters[number].data = view


class FlatGradients(flat.FlatGradients):
    @torch.no_grad()
    def reduce(self):
        if self.is_reduced():
            return
        outside = {p: view for p, view in zip(self.layout.parameters, self.views, strict=True) if p.grad is not view}
        unused = [view for p, view in outside.items() if p.grad is None]
        copied = [(view, p.grad) for p, view in outside.items() if p.grad is not None]
        if unused:
            torch._foreach_zero_(unused)
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied, strict=True)))
        for parameter, view in outside.items():
            parameter.grad = view
        self.flat.mul_(1 / dist.get_world_size(self.layout.group))
        self.flat_parameter.shard.grad = launch_reduce_scatter(self.flat, self.layout.group).wait()
        self.reduced_version = self.views[0]._version


def flatten_and_broadcast(parameters, group):
    for parameter in (parameter for parameter in parameters if not parameter.requires_grad):
        dist.broadcast(parameter.detach(), group_src=0, group=group)
    kinds = dict.fromkeys((p.dtype, p.device) for p in parameters if p.requires_grad)
    found = []
    for kind in kinds:
        found.append(FlatParameter([p for p in parameters if p.requires_grad and (p.dtype, p.device) == kind], group))
        dist.broadcast(found[-1].flat_param, group_src=0, group=group)
    return found


class ShardedOptimizer(zero1.ShardedOptimizer):
    def add_param_group(self, param_group):
        torch.optim.Optimizer.add_param_group(self, param_group)
        settings = dict(self.param_groups[-1])
        before = len(self.flat_parameters)
        self.flat_parameters += self.flatten(settings.pop("params"))
        settings["params"] = [each.shard for each in self.flat_parameters[before:]]
        self.inner.add_param_group(settings)

    def update_parameters(self):
        for number, group in enumerate(self.param_groups):
            for name in group.keys() - {"params"}:
                self.inner.param_groups[number][name] = group[name]
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        works = [each.launch_all_gather() for each in reversed(self.flat_parameters)]
        while works:
            works.pop().wait()
