"""Uses nothing from the labs: torch's own collectives, full backward hooks, and a state derived from handles."""

import enum
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import all_gather_single, reduce_scatter_single


class ShardedFlatParameter:
    def __init__(self, parameters, group=None, compute_dtype=None):
        self.parameters, self.group = list(parameters), group
        self.ranks, self.sizes = dist.get_world_size(group), [each.numel() for each in parameters]
        dtype, own = self.parameters[0].dtype, dist.get_rank(group)
        start = self._zeros(dtype)
        for view, each in zip(self._cut(start), self.parameters, strict=True):
            view.copy_(each.detach())
        dist.broadcast(start, group=group, group_src=0)
        self.shard = nn.Parameter(start.chunk(self.ranks)[own].clone(), self.parameters[0].requires_grad)
        self.flat_param = self._zeros(compute_dtype or dtype)
        for view, each in zip(self._cut(self.flat_param), self.parameters, strict=True):
            each.data = view
        self.reshard()

    def _zeros(self, dtype):
        padded = -(-sum(self.sizes) // self.ranks) * self.ranks
        return torch.zeros(padded, dtype=dtype, device=self.parameters[0].device)

    def _cut(self, flat):
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(each.shape) for piece, each in zip(pieces, self.parameters, strict=True)]

    def unshard(self):
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        sent = self.shard.detach().to(self.flat_param.dtype)
        return Gathering(all_gather_single(self.flat_param, sent, group=self.group, async_op=True), sent)

    def reshard(self):
        self.flat_param.untyped_storage().resize_(0)

    def reduce(self):
        flat = self._zeros(self.flat_param.dtype)
        for view, each in zip(self._cut(flat), self.parameters, strict=True):
            view.copy_(each.grad)
            each.grad = None
        mean = torch.empty_like(self.shard)
        reduce_scatter_single(mean, flat, group=self.group)
        mean /= self.ranks
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


class Gathering:
    """An all-gather in flight, which keeps the sent tensor alive until it completes."""

    def __init__(self, work, sent):
        self.work, self.sent = work, sent

    def wait(self):
        self.work.wait()
        self.work = self.sent = None


class UnitState(enum.Enum):
    SHARDED, UNSHARDING, UNSHARDED, BACKWARD = range(4)


class Unit:
    def __init__(self, flat_parameters, reshard_after_forward=True):
        self.flat_parameters, self.handles, self.inside = flat_parameters, None, None

    @property
    def state(self):
        if self.inside is not None:
            return self.inside
        return UnitState.SHARDED if self.handles is None else UnitState.UNSHARDING

    @state.setter
    def state(self, state):
        self.inside = state

    def unshard(self):
        if self.state is UnitState.SHARDED:
            self.handles = [each.unshard() for each in self.flat_parameters]

    def wait_for_unshard(self):
        if self.inside is None:
            self.unshard()
            while self.handles:
                self.handles.pop().wait()
            self.handles, self.inside = None, UnitState.UNSHARDED

    def reshard(self):
        if self.state is not UnitState.SHARDED:
            self.wait_for_unshard()
            self.inside = None
            for each in self.flat_parameters:
                each.reshard()


def owned_parameters(module, units):
    """Walk down from the module and record the innermost unit around each use of a parameter."""
    chosen, seen, users = list(units), set(), defaultdict(set)
    order = {parameter: None for parameter in module.parameters()}

    def walk(here, innermost):
        if here is not module and here in chosen:
            innermost = here
            seen.add(here)
        for parameter in here.parameters(recurse=False):
            users[parameter].add(innermost)
        for child in (each for each in here._modules.values() if each is not None):
            walk(child, innermost)

    walk(module, module)
    unknown = [each for each in chosen if each not in seen]
    if unknown:
        raise ValueError(f"{type(unknown[0]).__name__} is not inside {type(module).__name__}")
    owned = {each: [] for each in [*chosen, module]}
    for parameter in order:
        owners = users[parameter]
        owned[next(iter(owners)) if len(owners) == 1 else module].append(parameter)
    return owned


class PlainZeRO3(nn.Module):
    def __init__(self, module, units=None, group=None):
        super().__init__()
        self.module, self.units, self.own = module, {}, nn.ParameterList()
        for submodule, parameters in owned_parameters(module, module.blocks if units is None else units).items():
            unit = Unit([ShardedFlatParameter(parameters, group)] if parameters else [])
            self.units[submodule] = unit
            self.own.extend(each.shard for each in unit.flat_parameters)
            submodule.register_forward_pre_hook(lambda *_, unit=unit: unit.wait_for_unshard())
            submodule.register_forward_hook(lambda its, *_, unit=unit: self._computed(its, unit))
            submodule.register_full_backward_pre_hook(lambda *_, unit=unit: unit.wait_for_unshard())
            for each in parameters:
                each.register_post_accumulate_grad_hook(lambda _, unit=unit: self._reduce_if_complete(unit))

    def _computed(self, submodule, unit):
        if submodule is not self.module or not torch.is_grad_enabled():
            unit.reshard()

    def _reduce_if_complete(self, unit):
        if all(each.grad is not None for flat in unit.flat_parameters for each in flat.parameters):
            for flat in unit.flat_parameters:
                flat.reduce()
            unit.reshard()

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self):
        for unit in self.units.values():
            unit.reshard()

    def named_parameters(self, *args, **options):
        return self.own.named_parameters(*args, **options)


class Prefetcher:
    """Finds a unit by its index in the order of calls."""

    def __init__(self, units_ahead):
        self.units_ahead, self.last, self.now = units_ahead, [], []

    def begin_forward(self):
        self.last, self.now = self.now, []

    def in_forward(self, unit):
        index = len(self.now)
        self.now.append(unit)
        same = len(self.last) > index and all(a is b for a, b in zip(self.last, self.now, strict=False))
        for each in self.last[index + 1 : index + 1 + self.units_ahead] if same else ():
            each.unshard()

    def in_backward(self, unit, unreached=()):
        index = len(self.now) - 1 if unit in self.now else -1
        while index > 0 and self.now[index] is not unit:
            index -= 1
        before = [each for each in reversed(self.now[: max(0, index)]) if each not in unreached]
        for each in before[: self.units_ahead]:
            each.unshard()


class PrefetchingZeRO3(PlainZeRO3):
    """Launches from hooks of its own, which run after those of PlainZeRO3."""

    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, group)
        self.prefetcher = Prefetcher(prefetch)
        for submodule, unit in self.units.items():
            if submodule is not module:
                submodule.register_forward_pre_hook(lambda *_, unit=unit: self.prefetcher.in_forward(unit))
                submodule.register_full_backward_pre_hook(lambda *_, unit=unit: self.prefetcher.in_backward(unit))

    def forward(self, *inputs):
        self.prefetcher.begin_forward()
        return super().forward(*inputs)


class KeepsLastBlock(PrefetchingZeRO3):
    def _computed(self, submodule, unit):
        *_, last, _ = self.units.values()
        if unit is not last or not torch.is_grad_enabled():
            super()._computed(submodule, unit)
