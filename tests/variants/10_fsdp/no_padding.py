"""Uses no padding: shards differ in size, and each rank sends data directly to the rank that needs it.

Its GradientReducer packs every index again, as the lesson does, because a bucket ignores a gradient of None.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from shared.sharded.parameters import allow_reads
from solutions import flat, units, zero3


def cut(flat, group):
    """Split like torch.chunk: the last shards may be smaller or empty."""
    size = dist.get_world_size(group)
    n = -(-flat.numel() // size)
    return [flat[rank * n : (rank + 1) * n] for rank in range(size)]


def around(group):
    me, size = dist.get_rank(group), dist.get_world_size(group)
    return me, [(me + step) % size for step in range(1, size)]


class UnevenLayout(flat.FlatLayout):
    @property
    def shard_shape(self):
        return self.shard_of(torch.empty(self.numel, device="meta")).shape

    def new_flat(self, dtype=None):
        return self.parameters[0].new_zeros(self.numel, dtype=dtype)

    def shard_of(self, flat):
        return cut(flat, self.group)[dist.get_rank(self.group)]


class UnevenParameter(units.ShardedFlatParameter):
    def unshard(self):
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        allow_reads(self.layout.parameters)
        return self.launch(self.flat_param)

    def launch(self, flat):
        shards, (me, others) = cut(flat, self.layout.group), around(self.layout.group)
        shards[me].copy_(self.shard.detach())
        sends = [(shards[me], peer) for peer in others if shards[me].numel()]
        receives = [(shards[peer], peer) for peer in others if shards[peer].numel()]
        return Messages(sends, receives, self.layout.group)


class Messages:
    def __init__(self, sends, receives, group):
        ops = [dist.P2POp(dist.irecv, each, group=group, group_peer=peer) for each, peer in receives]
        ops += [dist.P2POp(dist.isend, each, group=group, group_peer=peer) for each, peer in sends]
        self.handles = dist.batch_isend_irecv(ops) if ops else []

    def wait(self):
        for handle in self.handles:
            handle.wait()


class Sum:
    """A reduce-scatter in flight."""

    def __init__(self, flat, group):
        shards, (me, others) = cut(flat, group), around(group)
        self.own, self.received = shards[me], [torch.empty_like(shards[me]) for _ in others]
        sends = [(shards[peer], peer) for peer in others if shards[peer].numel()]
        receives = [(each, peer) for each, peer in zip(self.received, others, strict=True) if each.numel()]
        self.messages = Messages(sends, receives, group)

    def wait(self):
        self.messages.wait()
        return sum(self.received, self.own)


class UnevenBucket(zero3.UnitBucket):
    def launch(self):
        if self.previous is not None:
            self.previous.wait()
        self.in_flight = Sum(self.flat, self.layout.group)


class GradientReducer(zero3.GradientReducer):
    def reduce(self, buckets):
        for bucket in buckets:
            if bucket not in self.launched:
                for index in range(len(bucket.parameters)):
                    bucket.pack(index)
                self.missing[bucket].clear()
                bucket.previous = self.launched[-1] if self.launched else None
                bucket.launch()
                self.launched.append(bucket)


@contextmanager
def uneven():
    before = flat.FlatLayout, units.ShardedFlatParameter, zero3.UnitBucket, zero3.GradientReducer
    flat.FlatLayout = units.FlatLayout = UnevenLayout
    units.ShardedFlatParameter, zero3.UnitBucket = UnevenParameter, UnevenBucket
    zero3.GradientReducer = GradientReducer
    try:
        yield
    finally:
        flat.FlatLayout, units.ShardedFlatParameter, zero3.UnitBucket, zero3.GradientReducer = before
        units.FlatLayout = before[0]


class ZeRO3(zero3.ZeRO3):
    def __init__(self, *args, **options):
        with uneven():
            super().__init__(*args, **options)

    @torch.no_grad()
    def full_state_dict(self):
        full = {}
        for flat_parameter in self.flat_parameters:
            flat = flat_parameter.layout.new_flat(flat_parameter.shard.dtype)
            flat_parameter.launch(flat).wait()
            full |= zip(flat_parameter.layout.parameters, flat_parameter.layout.views(flat), strict=True)
        state = self.module.state_dict(keep_vars=True)
        return {name: full.get(value, value).detach().clone() for name, value in state.items()}
