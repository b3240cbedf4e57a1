"""Nothing is filled up: parts differ in size, and each rank sends what another needs straight to it."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from solutions import zero3


def cut(flat, group):
    """As torch.chunk: the last parts may be smaller, or empty."""
    size = dist.get_world_size(group)
    part = -(-flat.numel() // size)
    return [flat[rank * part : (rank + 1) * part] for rank in range(size)]


def around(group):
    me, size = dist.get_rank(group), dist.get_world_size(group)
    return me, [(me + step) % size for step in range(1, size)]


class UnevenParameters(zero3.ShardedParameters):
    def new_flat(self):
        return self.parameters[0].new_zeros(sum(each.numel() for each in self.parameters))

    def own(self, flat):
        return cut(flat, self.group)[dist.get_rank(self.group)]

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        return self.begin(self.flat)

    def begin(self, flat):
        parts, (me, others) = cut(flat, self.group), around(self.group)
        parts[me].copy_(self.shard.detach())
        sends = [(parts[me], peer) for peer in others if parts[me].numel()]
        return Messages(sends, [(parts[peer], peer) for peer in others if parts[peer].numel()], self.group)


class Messages:
    def __init__(self, sends, receives, group):
        ops = [dist.P2POp(dist.irecv, each, group=group, group_peer=peer) for each, peer in receives]
        ops += [dist.P2POp(dist.isend, each, group=group, group_peer=peer) for each, peer in sends]
        self.handles = dist.batch_isend_irecv(ops) if ops else []

    def wait(self):
        for handle in self.handles:
            handle.wait()


class UnevenGradients(zero3.TravellingGradients):
    def launch(self):
        if self.before is not None:
            self.before.wait()
        group, parts = self.home.group, cut(self.flat, self.home.group)
        me, others = around(group)
        arrived = [torch.empty_like(parts[me]) for _ in others]
        sends = [(parts[peer], peer) for peer in others if parts[peer].numel()]
        receives = [(each, peer) for each, peer in zip(arrived, others, strict=True) if each.numel()]
        messages = Messages(sends, receives, group)

        def finish():
            messages.wait()
            return sum(arrived, parts[me]).clone()

        self.finish = finish


@contextmanager
def _uneven():
    before = zero3.ShardedParameters, zero3.TravellingGradients
    zero3.ShardedParameters, zero3.TravellingGradients = UnevenParameters, UnevenGradients
    try:
        yield
    finally:
        zero3.ShardedParameters, zero3.TravellingGradients = before


class ZeRO3(zero3.ZeRO3):
    def __init__(self, *args, **options):
        with _uneven():
            super().__init__(*args, **options)

    @torch.no_grad()
    def full_state_dict(self):
        whole = {}
        for part in self.parts:
            flat = part.shard.new_empty(part.flat.numel())
            part.begin(flat).wait()
            whole |= zip(part.parameters, part.slices_of(flat), strict=True)
        state = self.module.state_dict(keep_vars=True)
        return {name: whole.get(value, value).detach().clone() for name, value in state.items()}
