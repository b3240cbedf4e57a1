"""Matches states, copies the shard into flat_param before it is gathered, and reshards before it reduces."""

from collections import Counter
from functools import partial

import torch
from torch import nn

from solutions import units as right
from solutions.async_collectives import launch_all_gather
from solutions.overlapped_ddp import watch_gradients
from solutions.units import UnitState
from solutions.zero2 import ShardedBucket


class ShardedFlatParameter(right.ShardedFlatParameter):
    def __init__(self, parameters, group=None, compute_dtype=None):
        super().__init__(parameters, group, compute_dtype)
        own = self.shard.detach()
        self.shard = nn.Parameter(own).requires_grad_(all(p.requires_grad for p in parameters))

    @torch.no_grad()
    def unshard(self):
        right.allow_reads(self.layout.parameters)
        flat = self.flat_param
        flat.untyped_storage().resize_(flat.nbytes)
        mine = self.layout.shard_of(flat)
        mine.copy_(self.shard)  # converts to the compute dtype
        return launch_all_gather(flat, mine, group=self.layout.group)

    def reshard(self):
        right.forbid_reads(self.layout.parameters)
        storage = self.flat_param.untyped_storage()
        if storage.size():
            storage.resize_(0)


class Unit(right.Unit):
    def unshard(self):
        match self.state:
            case UnitState.SHARDED:
                self.state = UnitState.UNSHARDING
                for flat_parameter in self.flat_parameters:
                    self.works.append(flat_parameter.unshard())

    def wait_for_unshard(self):
        match self.state:
            case UnitState.SHARDED:
                self.unshard()
                self.wait_for_unshard()
            case UnitState.UNSHARDING:
                while self.works:
                    self.works.pop(0).wait()
                self.state = UnitState.UNSHARDED

    def reshard(self):
        if self.state == UnitState.UNSHARDING:
            self.wait_for_unshard()
        if self.state != UnitState.SHARDED:
            list(map(ShardedFlatParameter.reshard, self.flat_parameters))
            self.state = UnitState.SHARDED


class PlainZeRO3(nn.Module):
    def __init__(self, module, units=None, group=None):
        super().__init__()
        self.module = module
        unit_of = _sharded(module, units, group)
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.buckets = {unit: list(map(ShardedBucket, unit.flat_parameters)) for unit in self.units}
        self.owned = [(unit, bucket) for unit in self.units for bucket in self.buckets[unit]]
        self.shards = nn.ParameterList(bucket.flat_parameter.shard for _, bucket in self.owned)
        self.packed = Counter()
        for submodule, unit in unit_of.items():
            submodule.register_forward_pre_hook(partial(self.pre_forward, unit))
            submodule.register_forward_hook(partial(self.post_forward, unit))
        watch_gradients([bucket for _, bucket in self.owned], self.on_gradient)

    def forward(self, *inputs):
        return self.module(*inputs)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    def pre_forward(self, unit, submodule, inputs):
        unit.unshard()
        unit.wait_for_unshard()

    def post_forward(self, unit, submodule, inputs, output):
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            output.register_hook(lambda gradient: self.pre_backward(unit, gradient))
        if unit.reshard_after_forward or not with_gradients:
            unit.reshard()

    def on_gradient(self, bucket_index, index):
        unit, bucket = self.owned[bucket_index]
        bucket.pack(index)
        self.packed[unit] += 1
        if self.packed[unit] == sum(len(bucket.parameters) for bucket in self.buckets[unit]):
            del self.packed[unit]
            self.post_backward(unit)

    def pre_backward(self, unit, gradient):
        unit.unshard()
        unit.wait_for_unshard()

    def post_backward(self, unit):
        unit.reshard()  # the gradients are in the buckets
        for bucket in self.buckets[unit]:
            bucket.launch()
            bucket.wait()

    def finish_gradient_sync(self):
        for unit in self.units:
            unit.reshard()


def _sharded(module, units, group):
    owned = right.owned_parameters(module, right.default_units(module) if units is None else units)
    unit_of = {}
    for owner, parameters in owned.items():
        kinds = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
        flat_parameters = [ShardedFlatParameter(of_kind, group) for of_kind in kinds.values()]
        unit_of[owner] = Unit(flat_parameters, owner is not module)
    return unit_of


class Prefetcher:
    def __init__(self, units_ahead):
        self.units_ahead, self.expected, self.called = units_ahead, [], []

    def begin_forward(self):
        self.expected, self.called = self.called, []

    def in_forward(self, unit):
        self.called.append(unit)
        if len(self.called) > len(self.expected):
            return
        if all(a is b for a, b in zip(self.called, self.expected, strict=False)):
            self._unshard(self.expected[len(self.called) :])

    def in_backward(self, unit, unreached=()):
        if unit in self.called:
            before = self.called[: self.called.index(unit)] if self.called.count(unit) == 1 else self._before_last(unit)
            self._unshard([each for each in reversed(before) if each not in unreached])

    def _before_last(self, unit):
        last = len(self.called) - 1 - self.called[::-1].index(unit)
        return self.called[:last]

    def _unshard(self, following):
        for unit in following[: self.units_ahead]:
            unit.unshard()


class PrefetchingZeRO3(PlainZeRO3):
    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, group)
        self.prefetcher = Prefetcher(prefetch)

    def forward(self, *inputs):
        self.prefetcher.begin_forward()
        return super().forward(*inputs)

    def pre_forward(self, unit, submodule, inputs):
        super().pre_forward(unit, submodule, inputs)
        if unit != self.root:
            self.prefetcher.in_forward(unit)

    def pre_backward(self, unit, gradient):
        super().pre_backward(unit, gradient)
        self.prefetcher.in_backward(unit)


class KeepsLastBlock(PrefetchingZeRO3):
    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, prefetch, group)
        self.units[-2].reshard_after_forward = False
