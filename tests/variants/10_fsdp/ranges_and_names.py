"""Intersects ranges with accumulate(), and rebuilds the sets of missing gradients in each call."""

from itertools import accumulate

import torch
import torch.distributed as dist

from solutions import deferred, reducing
from solutions.zero3 import ZeRO3  # noqa: F401


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
