"""Intersects ranges with accumulate(), rebuilds sets in each call, and lets one hook serve all outputs of a unit."""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from solutions import deferred, reducing, row_shards
from solutions import zero3 as right
from solutions.units import UnitState


class RowShards(row_shards.RowShards):
    def places(self):
        """Yield each parameter with the shape that it has in a slot, and where it begins there."""
        first = 0
        for parameter in self.parameters:
            rows, rest = divmod(parameter.shape[0], self.world_size)
            shape = torch.Size([rows + bool(rest), *parameter.shape[1:]])
            yield parameter, shape, first
            first += shape.numel()
        self.numel = first

    def copy_in(self):
        places = list(self.places())
        slot = torch.zeros(self.numel, dtype=self.shards[0].dtype, device=self.shards[0].device)
        for (_, _, first), shard in zip(places, self.shards, strict=True):
            slot[first : first + shard.numel()] = shard.reshape(-1)
        return slot

    def copy_out(self, gathered):
        for parameter, shape, first in self.places():
            for rank in range(self.world_size):
                own = parameter[rank * shape[0] : (rank + 1) * shape[0]]
                begin = rank * (len(gathered) // self.world_size) + first
                own[...] = gathered[begin : begin + own.numel()].view(own.shape)


class GradientReducer(reducing.GradientReducer):
    def on_gradient(self, bucket_index, index):
        bucket = self.buckets[bucket_index]
        left = self.missing[bucket] - {index}
        if left == self.missing[bucket]:
            raise RuntimeError("this gradient is packed: finish_gradient_sync() must come before another backward()")
        bucket.pack(index)
        self.missing[bucket] = left

    def reduce(self, buckets):
        for bucket in buckets:
            if not any(bucket is each for each in self.launched):
                list(map(bucket.pack, sorted(self.missing.pop(bucket))))
                self.missing[bucket] = set()
                bucket.previous = None if not self.launched else self.launched[-1]
                bucket.launch()
                self.launched += [bucket]

    def finish(self):
        self.reduce(list(self.buckets))
        waiting = list(self.buckets)
        while waiting:
            waiting.pop(0).wait()
        self._begin()


class Materializer(deferred.Materializer):
    @torch.no_grad()
    def shard_of(self, layout):
        shard = torch.empty(layout.shard_shape, dtype=layout.parameters[0].dtype, device=self.device).fill_(0)
        own = dist.get_rank(layout.group) * len(shard)
        sizes = [parameter.numel() for parameter in layout.parameters]
        for parameter, end in zip(layout.parameters, accumulate(sizes), strict=True):
            begin = end - parameter.numel()
            both = range(max(begin, own), min(end, own + len(shard)))
            if both:
                self._fill(shard[both.start - own : both.stop - own], parameter, both.start - begin)
        return shard

    def _fill(self, into, parameter, first):
        into.copy_(self.value_of(parameter).reshape(-1).narrow(0, first, len(into)))


class ZeRO3(right.ZeRO3):
    def pre_forward(self, unit, submodule, inputs, kwargs):
        if unit.state is not UnitState.BACKWARD:
            unit.unshard()
            unit.wait_for_unshard()
            if unit != self.root:
                self.prefetcher.in_forward(unit)
            if torch.is_grad_enabled():
                return self._watch_inputs(unit, inputs, kwargs)

    def post_forward(self, unit, submodule, inputs, output):
        if unit.state is UnitState.BACKWARD:
            return
        records = torch.is_grad_enabled()
        if records:
            self._watch_outputs(unit, output)
        if not records or unit.reshard_after_forward:
            unit.reshard()

    def _watch_inputs(self, unit, inputs, kwargs):
        call = self.calls[unit] = right.Call()
        call.begin = right.ForwardBegin(unit.flat_parameters)
        found = []
        tree_map(lambda each: found.append(each) if getattr(each, "requires_grad", False) else None, (inputs, kwargs))
        if not found:
            return inputs, kwargs
        done = right.AfterBackward.apply(lambda: self._end_call(unit, call), *found, self.backward.witness)
        watched = iter(done)
        return tree_map(lambda each: next(watched) if getattr(each, "requires_grad", False) else each, (inputs, kwargs))

    def _watch_outputs(self, unit, output):
        call = self.calls.pop(unit)

        def begin(_):
            self._begin_call(unit, call)

        for tensor in list(call.begin.tensors_of(output)):
            tensor.register_hook(begin)
            unit.open_calls |= {call}

    def pre_backward(self, unit, call):
        unit.wait_for_unshard()
        self.pending, unit.state = True, UnitState.BACKWARD
        self.prefetcher.in_backward(unit, [each for each in self.units if len(each.open_calls) == 0])

    def post_backward(self, unit, call):
        unit.open_calls -= {call}
        if unit.open_calls:
            return
        self.reducer.reduce(self.buckets_of[unit])
        unit.reshard()
