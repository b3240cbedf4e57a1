"""Counts missing gradients per bucket, allocates a new flat tensor in each step, and divides after the all-reduce."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from shared import guards


class OverlappedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.module, self.group, self.cap = module, group, bucket_cap_mb
        self.depth, self.to_average, self.averaged_in_backward = 0, 0, False
        root = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, root, group)
        self.buckets, rest = [], {}
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            last, room = rest.get(parameter.dtype, (None, 0))
            if room < parameter.nbytes:
                room = 2**20 * (min(1, bucket_cap_mb) if last is None else bucket_cap_mb)
                self.buckets.append(last := [])
            last.append(parameter)
            rest[parameter.dtype] = last, room - parameter.nbytes
        self.bucket_index_of = {id(p): bucket_index for bucket_index, bucket in enumerate(self.buckets) for p in bucket}
        self._begin()
        self.hooks = [p.register_post_accumulate_grad_hook(_Weakly(self)) for bucket in self.buckets for p in bucket]

    def __deepcopy__(self, memo):
        import copy

        return OverlappedDDP(copy.deepcopy(self.module, memo), self.cap, self.group)

    def __del__(self):
        for hook in self.__dict__.get("hooks", []):
            hook.remove()

    def _begin(self):
        self.left = [len(bucket) for bucket in self.buckets]
        self.complete, self.in_flight = set(), []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, parameter):
        if parameter.grad.grad_fn is not None:
            raise RuntimeError("create_graph=True is not supported: messages have no derivative")
        self.to_average += 1
        if self.depth:
            return
        if not self.complete:
            Variable._execution_engine.queue_callback(self._average)
        self.complete.add(id(parameter))
        self.left[self.bucket_index_of[id(parameter)]] -= 1
        while len(self.in_flight) < len(self.buckets) and self.left[len(self.in_flight)] == 0:
            self._launch()

    def _launch(self):
        bucket = self.buckets[len(self.in_flight)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = piece.view(parameter.shape)
        self.in_flight.append((dist.all_reduce(flat, group=self.group, async_op=True), flat))

    def finish_gradient_sync(self):
        if not self.depth:
            if self.to_average or not self.averaged_in_backward:
                self._average()
            self.averaged_in_backward = False

    def _average(self):
        self.to_average, self.averaged_in_backward = 0, True
        while len(self.in_flight) < len(self.buckets):
            self._launch()
        for handle, flat in self.in_flight:
            handle.wait()
            flat /= dist.get_world_size(self.group)
        self._begin()

    @contextlib.contextmanager
    def no_sync(self):
        self.depth += 1
        try:
            yield self
        finally:
            self.depth -= 1


class _Weakly:
    def __init__(self, wrapper):
        import weakref

        self.wrapper = weakref.ref(wrapper)

    def __call__(self, parameter):
        self.wrapper().ready(parameter)


class LaunchQueue:
    """Records what is packed in one list of flags per bucket, without sets."""

    def __init__(self, buckets):
        self.buckets, self.packed, self.turn = buckets, [[False] * len(b.parameters) for b in buckets], 0

    def add(self, bucket_index, index):
        self.buckets[bucket_index].pack(index)
        self.packed[bucket_index][index] = True
        for bucket, packed in list(zip(self.buckets, self.packed, strict=True))[self.turn :]:
            if not all(packed):
                return
            bucket.launch()
            self.turn += 1

    def finish(self):
        for bucket_index in range(len(self.buckets)):
            for index, packed in enumerate(self.packed[bucket_index]):
                if not packed:
                    self.buckets[bucket_index].pack(index)
            if bucket_index >= self.turn:
                self.buckets[bucket_index].launch()
        for bucket in reversed(self.buckets):
            bucket.wait()
        self.__init__(self.buckets)


class GradientSync:
    """Uses its own queue, and asks for the end of backward when no gradient is packed yet."""

    def __init__(self, buckets):
        self.enabled, self.pending, self.done, self.queue = True, False, False, LaunchQueue(list(buckets))
        for bucket_index, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _, which=(bucket_index, index): self.on_gradient(*which)
                )

    def on_gradient(self, bucket_index, index):
        is_first, self.pending = not any(map(any, self.queue.packed)), True
        if not self.enabled:
            return
        if is_first:
            Variable._execution_engine.queue_callback(self.synchronize)
        self.queue.add(bucket_index, index)

    @guards.synchronizes
    def synchronize(self):
        self.pending = False
        self.done = True
        self.queue.finish()

    def finish(self):
        if not self.enabled:
            return
        if self.done and not self.pending:
            self.done = False
            return
        self.synchronize()
        self.done = False
