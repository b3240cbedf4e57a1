"""Uses no padding: shards differ in size, and each rank sends data directly to the rank that needs it."""

import torch
import torch.distributed as dist
from torch import nn

from solutions import units
from solutions.flat import FlatLayout


def cut(flat, group):
    """Split like torch.chunk: the last shards may be smaller or empty."""
    size = dist.get_world_size(group)
    n = -(-flat.numel() // size)
    return [flat[rank * n : (rank + 1) * n] for rank in range(size)]


def exchange(sends, receives, group):
    """Launch sends and receives, skipping empty tensors, and return their handles."""
    ops = [dist.P2POp(dist.irecv, each, group=group, group_peer=peer) for peer, each in receives if each.numel()]
    ops += [dist.P2POp(dist.isend, each, group=group, group_peer=peer) for peer, each in sends if each.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


class InFlight:
    def __init__(self, handles):
        self.handles = handles

    def wait(self):
        for handle in self.handles:
            handle.wait()


class UnevenLayout(FlatLayout):
    def new_flat(self, dtype=None):
        return self.parameters[0].new_zeros(self.numel, dtype=dtype)

    def shard_of(self, flat):
        return cut(flat, self.group)[dist.get_rank(self.group)]


class UnevenFlatParameter:
    """Does not inherit from FlatParameter: has only flat_param, shard, and the collectives between them."""

    def __init__(self, parameters, group=None, compute_dtype=None):
        self.parameters, self.group, self.layout = parameters, group, UnevenLayout(parameters, group)
        first = torch.cat([each.detach().flatten() for each in parameters])
        dist.broadcast(first, group=group, group_src=0)
        self.shard = nn.Parameter(self.layout.shard_of(first).clone(), parameters[0].requires_grad)
        self.flat_param = torch.empty_like(first, dtype=compute_dtype)
        for parameter, view in zip(parameters, self.layout.views(self.flat_param), strict=True):
            parameter.data = view
        self.reshard()

    def unshard(self):
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        me, shards = dist.get_rank(self.group), cut(self.flat_param, self.group)
        shards[me].copy_(self.shard.detach())
        others = [(peer, each) for peer, each in enumerate(shards) if peer != me]
        return InFlight(exchange([(peer, shards[me]) for peer, _ in others], others, self.group))

    def reshard(self):
        self.flat_param.untyped_storage().resize_(0)

    def reduce(self):
        """Add the mean gradient to shard.grad."""
        gradient = torch.cat([each.grad.flatten() for each in self.parameters])
        for each in self.parameters:
            each.grad = None
        me, shards = dist.get_rank(self.group), cut(gradient, self.group)
        others = [(peer, each) for peer, each in enumerate(shards) if peer != me]
        received = [(peer, torch.empty_like(shards[me])) for peer, _ in others]
        InFlight(exchange(others, received, self.group)).wait()
        mean = sum((each for _, each in received), shards[me]) / len(shards)
        self.shard.grad = mean.clone() if self.shard.grad is None else self.shard.grad + mean


class PlainZeRO3(nn.Module):
    """Reduces a unit when all of its gradients are complete."""

    def __init__(self, module, units=None, group=None):
        super().__init__()
        self.module = module
        self.flats = self.shard_into_units(module, units, group)
        self.shards = nn.ParameterList(flat.shard for flats in self.flats.values() for flat in flats)
        for submodule, flats in self.flats.items():
            is_root = submodule is module
            submodule.register_forward_pre_hook(lambda *_, flats=flats: self.unshard(flats))
            submodule.register_forward_hook(
                lambda _submodule, _inputs, output, flats=flats, is_root=is_root: self.after(flats, is_root, output)
            )
            parameters = [each for flat in flats for each in flat.parameters]
            for each in parameters:
                each.register_post_accumulate_grad_hook(
                    lambda _, flats=flats, parameters=parameters: self.reduce(flats, parameters)
                )

    def shard_into_units(self, module, given, group):
        chosen = units.default_units(module) if given is None else given
        owned = units.owned_parameters(module, chosen)
        return {unit: [UnevenFlatParameter(own, group)] if own else [] for unit, own in owned.items()}

    def forward(self, *inputs):
        return self.module(*inputs)

    def unshard(self, flats):
        for flat in flats:
            if flat.flat_param.untyped_storage().nbytes() == 0:
                flat.unshard().wait()

    def after(self, flats, is_root, output):
        if torch.is_grad_enabled():
            output.register_hook(lambda _: self.unshard(flats))
        if not (is_root and torch.is_grad_enabled()):
            for flat in flats:
                flat.reshard()

    def reduce(self, flats, parameters):
        if all(each.grad is not None for each in parameters):
            for flat in flats:
                flat.reduce()
                flat.reshard()

    def finish_gradient_sync(self):
        for flats in self.flats.values():
            for flat in flats:
                flat.reshard()

    def named_parameters(self, *args, **options):
        return self.shards.named_parameters(*args, **options)
