"""Joins pieces by torch.cat(), and keeps numbers of packed gradients in dicts of flags."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from solutions import deferred, reducing, row_shards
from solutions.zero3 import ZeRO3  # noqa: F401


class RowShards(row_shards.RowShards):
    def numels(self):
        return [-(-len(p) // self.world_size) * p.shape[1:].numel() for p in self.parameters]

    def copy_in(self):
        pairs = zip(self.shards, self.numels(), strict=True)
        return torch.cat([pad(shard.flatten(), (0, numel - shard.numel())) for shard, numel in pairs])

    def copy_out(self, gathered):
        columns = gathered.reshape(self.world_size, -1).split(self.numels(), dim=1)
        for p, slots in zip(self.parameters, columns, strict=True):
            p.data.copy_(slots.reshape(-1, *p.shape[1:])[: len(p)])


class GradientReducer(reducing.GradientReducer):
    def on_gradient(self, bucket_index, index):
        bucket = self.buckets[bucket_index]
        try:
            self.missing[bucket].remove(index)
        except KeyError:
            raise RuntimeError("a second gradient: call finish_gradient_sync() after each backward()") from None
        bucket.pack(index)

    def reduce(self, buckets):
        for bucket in (each for each in buckets if each not in self.launched):
            while self.missing[bucket]:
                bucket.pack(self.missing[bucket].pop())
            bucket.previous = next(reversed(self.launched), None)
            self.launched.append(bucket)
            bucket.launch()

    def finish(self):
        self.reduce([bucket for bucket in self.buckets if bucket not in self.launched])
        for bucket in reversed(self.launched):
            bucket.wait()
        self._begin()


class Materializer(deferred.Materializer):
    def shard_of(self, layout):
        n = layout.shard_shape.numel()
        begin, pieces, offset = dist.get_rank(layout.group) * n, [], 0
        for parameter in layout.parameters:
            start, stop = max(begin - offset, 0), min(begin + n - offset, parameter.numel())
            if start < stop:
                pieces.append(self.value_of(parameter).reshape(-1)[start:stop].clone())
            offset += parameter.numel()
        filled = sum(map(len, pieces))
        pieces.append(torch.zeros(n - filled, dtype=layout.parameters[0].dtype, device=self.device))
        return torch.cat(pieces)
