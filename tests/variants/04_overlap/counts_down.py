"""Counts missing gradients per bucket, allocates a new flat tensor in each step, and divides after the all-reduce."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

_ADVICE = "call finish_gradient_sync() first, or let gradients add up inside no_sync()"


class OverlappedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.module, self.group, self.cap = module, group, bucket_cap_mb
        self.depth = 0
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
        self.number_of = {id(p): number for number, bucket in enumerate(self.buckets) for p in bucket}
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
        self.came, self.under_way = set(), []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, parameter):
        if self.depth:
            if self.under_way:
                raise RuntimeError(_ADVICE)
            return
        if id(parameter) in self.came:
            raise RuntimeError(f"a second backward: {_ADVICE}")
        if parameter.grad.grad_fn is not None:
            raise RuntimeError("create_graph=True is not supported: messages have no derivative")
        self.came.add(id(parameter))
        self.left[self.number_of[id(parameter)]] -= 1
        while len(self.under_way) < len(self.buckets) and self.left[len(self.under_way)] == 0:
            self._launch()

    def _launch(self):
        bucket = self.buckets[len(self.under_way)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = piece.view(parameter.shape)
        self.under_way.append((dist.all_reduce(flat, group=self.group, async_op=True), flat))

    def finish_gradient_sync(self):
        if self.depth:
            return
        while len(self.under_way) < len(self.buckets):
            self._launch()
        for handle, flat in self.under_way:
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

    def add(self, number, place):
        self.buckets[number].pack(place)
        self.packed[number][place] = True
        for bucket, packed in list(zip(self.buckets, self.packed, strict=True))[self.turn :]:
            if not all(packed):
                return
            bucket.launch()
            self.turn += 1

    def finish(self):
        for number in range(len(self.buckets)):
            for place, packed in enumerate(self.packed[number]):
                if not packed:
                    self.buckets[number].pack(place)
            if number >= self.turn:
                self.buckets[number].launch()
        for bucket in reversed(self.buckets):
            bucket.wait()
        self.__init__(self.buckets)


class GradientSync:
    """Uses its own queue and records complete gradients in a set."""

    def __init__(self, buckets):
        self.come, self.enabled, self.pending, self.queue = set(), True, False, LaunchQueue(list(buckets))
        for number, bucket in enumerate(buckets):
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, which=(number, place): self.on_gradient(*which))

    def on_gradient(self, bucket_index, index):
        if (bucket_index, index) in self.come:
            raise RuntimeError(_ADVICE)
        self.pending = True
        if not self.enabled:
            return
        self.come.add((bucket_index, index))
        self.queue.add(bucket_index, index)

    def finish(self):
        if self.enabled:
            self.come, self.pending = set(), False
            self.queue.finish()
