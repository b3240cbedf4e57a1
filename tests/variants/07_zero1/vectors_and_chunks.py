"""Uses torch's parameters_to_vector and chunk(), and turns states around in dicts by parameter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from solutions import flat, optimizer_state, zero1
from solutions.async_collectives import launch_all_gather, reduce_scatter_
from solutions.collectives import gather_shards


class FlatParameter(flat.FlatParameter):
    def __init__(self, parameters, group=None):
        self.group, self.parameters = group, parameters
        self.layout = flat.FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        self.flat_param[: self.layout.numel].copy_(parameters_to_vector(parameters).detach())
        self._alias_parameters()
        self.shard = nn.Parameter(self.flat_param.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    def launch_all_gather(self):
        return launch_all_gather(self.flat_param, self.shard.data, self.group)

    def _alias_parameters(self):
        vector_to_parameters(self.flat_param[: self.layout.numel], self.layout.parameters)


class FlatGradients(flat.FlatGradients):
    def reduce(self):
        if self.is_reduced():
            return
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is view:
                continue
            view.copy_(torch.zeros_like(view) if parameter.grad is None else parameter.grad)
            parameter.grad = view
        total = reduce_scatter_(self.flat, self.layout.group)
        self.flat_parameter.shard.grad = total / dist.get_world_size(self.layout.group)
        self.reduced_version = self.views[0]._version


def flatten_and_broadcast(parameters, group):
    trained = {}
    for parameter in parameters:
        if parameter.requires_grad:
            trained.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        else:
            dist.broadcast(parameter.data, group_src=0, group=group)
    flat_parameters = [FlatParameter(of_kind, group) for of_kind in trained.values()]
    works = [dist.broadcast(each.flat_param, group_src=0, group=group, async_op=True) for each in flat_parameters]
    for work in works:
        work.wait()
    return flat_parameters


class ShardedOptimizer(zero1.ShardedOptimizer):
    def add_param_group(self, param_group):
        torch.optim.Optimizer.add_param_group(self, param_group)
        param_group = self.param_groups[-1]
        added = self.flatten(param_group["params"])
        self.flat_parameters.extend(added)
        self.inner.add_param_group(param_group | {"params": [each.shard for each in added]})

    def update_parameters(self):
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            shards = theirs["params"]
            theirs.clear()
            theirs.update(ours, params=shards)
        self.inner.step()
        handles = {id(each): each.launch_all_gather() for each in self.flat_parameters}
        for each in self.flat_parameters:
            handles.pop(id(each)).wait()
            each.shard.grad = None

    def state_dict(self, to=None):
        packed = torch.optim.Optimizer.state_dict(self)
        index_of = self._index_of(packed["param_groups"])
        for each in self.flat_parameters:
            for name, entry in self.inner.state.get(each.shard, {}).items():
                for parameter, value in _values_of(each.layout, entry, to):
                    packed["state"].setdefault(index_of[parameter], {})[name] = value
        return packed if to is None or to == dist.get_rank(self.group) else None

    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        index_of = self._index_of(state_dict["param_groups"])
        for each in self.flat_parameters:
            entries = [state_dict["state"].get(index_of[parameter], {}) for parameter in each.layout.parameters]
            names = {name: [its.get(name) for its in entries] for its in entries for name in its}
            self.inner.state[each.shard] = {
                name: shard_entry(each.layout, name, values) for name, values in names.items()
            }


def _values_of(layout, entry, to):
    if torch.is_tensor(entry) and entry.shape == layout.shard_shape and entry.dim():
        whole = gather_shards(entry, layout.group, to)
        values = [] if whole is None else [view.clone() for view in layout.views(whole)]
    else:
        values = [entry.clone() if torch.is_tensor(entry) else entry for _ in layout.parameters]
    return zip(layout.parameters, values, strict=False)


def shard_entry(layout, name, values):
    known = [value for value in values if value is not None]
    if not optimizer_state.is_per_element(name, values, layout.parameters):
        return known[0].clone() if torch.is_tensor(known[0]) else known[0]
    whole, offset = optimizer_state.new_entry(layout, name, known[0].dtype), 0
    for parameter, value in zip(layout.parameters, values, strict=True):
        if value is not None:
            whole[offset : offset + parameter.numel()] = value.view(-1)
        offset += parameter.numel()
    return layout.shard_of(whole).clone()


class ZeRO1(ShardedOptimizer):
    def __init__(self, params, optimizer_cls, group=None, **defaults):
        self.gradients, self.is_stale = [], False
        super().__init__(params, optimizer_cls, self._flat, group, **defaults)

    def _flat(self, parameters):
        added = flatten_and_broadcast(parameters, self.group)
        self.gradients.extend(map(FlatGradients, added))
        return added

    def zero_grad(self, set_to_none=True):
        [gradients.reset() for gradients in self.gradients]
        self.is_stale = False

    def reduce_gradients(self):
        if self.is_stale and any(gradients.holds_gradients() for gradients in self.gradients):
            raise RuntimeError("these gradients are used up: call zero_grad() first")
        self.is_stale = False
        with torch.no_grad():
            for gradients in self.gradients:
                gradients.reduce()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        squared = torch.zeros((), dtype=torch.float64)
        shards = [each.shard for each in self.flat_parameters]
        for shard in shards:
            squared = squared.to(shard.device) + torch.dot(shard.grad.double(), shard.grad.double())
        if shards:
            dist.all_reduce(squared, group=self.group)
        for shard in shards:
            shard.grad.mul_(min(1.0, max_norm / (squared.sqrt().item() + 1e-6)))
        return squared.sqrt()

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.reduce_gradients()
        self.update_parameters()
        self.is_stale = True
        return loss
