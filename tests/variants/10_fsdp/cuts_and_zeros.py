"""Joins pieces by torch.cat(), and keeps numbers of packed gradients in dicts of flags."""

import torch
import torch.distributed as dist

from solutions import deferred, reducing
from solutions.zero3 import ZeRO3  # noqa: F401


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
