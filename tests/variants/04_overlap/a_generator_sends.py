"""Implements only the wrapper: a generator walks through the buckets and launches each one when it is complete."""

import copy
import weakref

import torch
import torch.distributed as dist
from torch import nn


class _Quiet:
    def __init__(self, wrapper):
        self.wrapper = wrapper

    def __enter__(self):
        self.before, self.wrapper.quiet = self.wrapper.quiet, True

    def __exit__(self, *_):
        self.wrapper.quiet = self.before


class OverlappedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.module, self.quiet, self.cap_mb, self.group = module, False, bucket_cap_mb, group
        self.left, self.ended_itself = False, False
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, group_src=0, group=group)
        self.order = self._plan()
        self.flat = [torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype) for bucket in self.order]
        self.flat = [flat.to(bucket[0].device) for flat, bucket in zip(self.flat, self.order, strict=True)]
        self._begin()
        self_or_none = weakref.ref(self)

        def on_gradient(parameter):
            wrapper = self_or_none()
            if wrapper is not None:
                wrapper._on_gradient(parameter)

        for parameter in (p for bucket in self.order for p in bucket):
            parameter.register_post_accumulate_grad_hook(on_gradient)

    def _plan(self):
        order, last = [], {}
        for parameter in list(self.module.parameters())[::-1]:
            if not parameter.requires_grad:
                continue
            kind = parameter.dtype
            cap = self.cap_mb if last.get(kind, (0, None))[0] > 1 else min(self.cap_mb, 1)
            if kind not in last or sum(p.nbytes for p in last[kind][1]) + parameter.nbytes > cap * 2**20:
                last[kind] = (last.get(kind, (0, None))[0] + 1, [])
                order.append(last[kind][1])
            last[kind][1].append(parameter)
        return order

    def __deepcopy__(self, memo):
        return type(self)(copy.deepcopy(self.module, memo), self.cap_mb, self.group)

    def _begin(self):
        self.complete, self.ended, self.works = set(), False, []
        self.sender = self._send()
        next(self.sender, None)

    def _send(self):
        for bucket, flat in zip(self.order, self.flat, strict=True):
            while not self.ended and any(id(p) not in self.complete for p in bucket):
                yield
            start = 0
            for parameter in bucket:
                piece = flat[start : (start := start + parameter.numel())].view(parameter.shape)
                if parameter.grad is None:
                    piece.zero_()
                elif parameter.grad.data_ptr() != piece.data_ptr():
                    piece.copy_(parameter.grad)
                parameter.grad = piece
            self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    def _on_gradient(self, parameter):
        if parameter.grad.requires_grad:
            raise RuntimeError("gradients of gradients (create_graph) are not for messages")
        self.left = True
        if not self.quiet:
            if not self.complete:
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self.complete.add(id(parameter))
            next(self.sender, None)

    def finish_gradient_sync(self):
        if self.quiet:
            return
        if self.left or not self.ended_itself:
            self._end()
        self.ended_itself = False

    def _end(self):
        self.left, self.ended_itself, self.ended = False, True, True
        next(self.sender, None)
        for work, flat in zip(self.works, self.flat, strict=True):
            work.wait()
            flat /= dist.get_world_size(self.group)
        self._begin()

    def no_sync(self):
        return _Quiet(self)
