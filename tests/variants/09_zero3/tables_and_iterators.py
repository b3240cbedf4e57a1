"""Looks transitions up in a table, keeps handles in a generator, and prefetches through iterators."""

from functools import partial
from itertools import filterfalse, islice

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
        mine = torch.empty(self.layout.shard_shape, dtype=self.shard.dtype, device=self.shard.device)
        self.shard = nn.Parameter(mine.copy_(self.shard.detach()), requires_grad=parameters[0].requires_grad)

    def unshard(self):
        right.allow_reads(self.layout.parameters)
        storage = self.flat_param.untyped_storage()
        storage.resize_(self.flat_param.numel() * self.flat_param.element_size())
        sent = self.shard.data.type(self.flat_param.dtype)
        return launch_all_gather(shard=sent, flat=self.flat_param, group=self.layout.group)

    def reshard(self):
        right.forbid_reads(self.layout.parameters)
        torch.UntypedStorage.resize_(self.flat_param.untyped_storage(), 0)


class Unit(right.Unit):
    def _waits(self):
        handles = [flat_parameter.unshard() for flat_parameter in self.flat_parameters]
        yield
        for handle in handles:
            handle.wait()

    def unshard(self):
        if self.state.name == "SHARDED":
            self.works = [self._waits()]
            next(self.works[0])
            self.state = UnitState.UNSHARDING

    def wait_for_unshard(self):
        self.unshard()
        if self.state is UnitState.UNSHARDING:
            next(self.works.pop(), None)
            self.state = UnitState.UNSHARDED

    def reshard(self):
        steps = {"SHARDED": (), "UNSHARDING": (self.wait_for_unshard, self._free)}
        for step in steps.get(self.state.name, (self._free,)):
            step()

    def _free(self):
        for flat_parameter in reversed(self.flat_parameters):
            flat_parameter.reshard()
        self.state = UnitState.SHARDED


class Prefetcher:
    def __init__(self, units_ahead):
        self.units_ahead = units_ahead
        self.expected: list = []
        self.called: list = []

    def begin_forward(self):
        self.expected = list(self.called)
        self.called = []

    def in_forward(self, unit):
        self.called = [*self.called, unit]
        rest = iter(self.expected)
        if all(next(rest, None) is each for each in self.called):
            self._launch(rest)

    def in_backward(self, unit, unreached=()):
        backwards = reversed(self.called)
        if any(each is unit for each in backwards):  # has consumed everything up to this unit
            self._launch(filterfalse(set(unreached).__contains__, backwards))

    def _launch(self, units):
        for unit in islice(units, self.units_ahead):
            unit.unshard()


class PrefetchingZeRO3(nn.Module):
    """Stands alone, and counts a unit's missing gradients down."""

    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__()
        self.module, self.prefetcher, self.units, buckets = module, Prefetcher(prefetch), [], []
        chosen = right.default_units(module) if units is None else units
        for owner, parameters in right.owned_parameters(module, chosen).items():
            unit = Unit([ShardedFlatParameter(parameters, group)] if parameters else [])
            unit.is_root, unit.buckets = owner is module, [ShardedBucket(each) for each in unit.flat_parameters]
            unit.numel = unit.missing = len(parameters)
            self.units.append(unit)
            buckets += [(unit, bucket) for bucket in unit.buckets]
            owner.register_forward_pre_hook(partial(self._begin, unit))
            owner.register_forward_hook(partial(self._end, unit))
        self.owners = buckets
        self.shards = nn.ParameterList(bucket.flat_parameter.shard for _, bucket in buckets)
        watch_gradients([bucket for _, bucket in buckets], self.on_gradient)

    def forward(self, *inputs):
        self.prefetcher.begin_forward()
        return self.module(*inputs)

    def named_parameters(self, *options, **named):
        return self.shards.named_parameters(*options, **named)

    def _begin(self, unit, *_):
        unit.wait_for_unshard()
        if not unit.is_root:
            self.prefetcher.in_forward(unit)

    def _end(self, unit, _, inputs, output):
        if torch.is_grad_enabled():
            output.register_hook(partial(self._again, unit))
        if not (unit.is_root and torch.is_grad_enabled()):
            unit.reshard()

    def _again(self, unit, _):
        unit.wait_for_unshard()
        self.prefetcher.in_backward(unit)

    def on_gradient(self, bucket_index, index):
        unit, bucket = self.owners[bucket_index]
        bucket.pack(index)
        unit.missing -= 1
        if not unit.missing:
            unit.missing = unit.numel
            for step in ("launch", "wait"):
                [getattr(each, step)() for each in unit.buckets]
            unit.reshard()

    def finish_gradient_sync(self):
        [unit.reshard() for unit in self.units]


class KeepsLastBlock(PrefetchingZeRO3):
    def _end(self, unit, submodule, inputs, output):
        if unit is self.units[-2] and torch.is_grad_enabled():
            output.register_hook(partial(self._again, unit))
        else:
            super()._end(unit, submodule, inputs, output)
