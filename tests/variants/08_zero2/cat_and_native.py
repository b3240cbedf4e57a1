"""Implements only the wrapper: concatenates a bucket's gradients when it is full, and uses torch's collectives."""

import contextlib
import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import all_gather_single, reduce_scatter_single
from solutions.zero1 import ShardedOptimizer


class _Row:
    """A bucket, its flat parameter, and their layout in one object."""

    def __init__(self, parameters, group):
        self.parameters, self.group = parameters, group
        self.size, self.layout, self.in_flight = dist.get_world_size(group), self, None
        numel = sum(p.numel() for p in parameters)
        self.flat = parameters[0].new_zeros((numel + self.size - 1) // self.size * self.size).detach()
        for p, piece in zip(parameters, self.views(self.flat), strict=True):
            piece.copy_(p.data)
        self.shard = nn.Parameter(self.shard_of(self.flat))
        self.shard_shape = self.shard.shape
        self._point()

    def _point(self):
        for p, piece in zip(self.parameters, self.views(self.flat), strict=True):
            p.data = piece

    def __setstate__(self, state):
        vars(self).update(state)
        self.shard.data = self.shard_of(self.flat)
        self._point()

    def new_flat(self, dtype=None):
        return torch.zeros_like(self.flat, dtype=dtype)

    def shard_of(self, flat):
        return flat.chunk(self.size)[dist.get_rank(self.group)]

    def views(self, flat):
        ends = torch.tensor([0] + [p.numel() for p in self.parameters]).cumsum(0).tolist()
        return [flat[a:b].view(p.shape) for p, a, b in zip(self.parameters, ends, ends[1:], strict=False)]

    def launch_all_gather(self):
        return all_gather_single(self.flat, self.shard.detach(), group=self.group, async_op=True)

    def send(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        if any(grad.requires_grad for grad in grads):
            raise RuntimeError("create_graph=True is not supported")
        padding = self.flat.new_zeros(self.flat.numel() - sum(p.numel() for p in self.parameters))
        whole = torch.cat([*(grad.reshape(-1) for grad in grads), padding])
        del grads
        for p in self.parameters:
            p.grad = None
        part = whole.new_empty(whole.numel() // self.size)
        self.in_flight = (reduce_scatter_single(part, whole, group=self.group, async_op=True), part, whole)

    def take(self):
        if self.in_flight is not None:
            handle, part, _ = self.in_flight
            handle.wait()
            part /= self.size
            self.shard.grad = part if self.shard.grad is None else self.shard.grad + part
            self.in_flight = None

    def drop(self):
        self.shard.grad = None
        for p in self.parameters:
            p.grad = None


def _rows(rows, parameters):
    return rows


class ZeRO2(nn.Module):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__()
        self.module, self.depth, self.done = module, 0, False
        for tensor in [*module.buffers(), *module.parameters()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        lists, rooms = [], {}
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            last, room = rooms.get(p.dtype, (None, -1))
            if p.nbytes > room:
                last, room = [], 2**20 * (min(1.0, bucket_cap_mb) if last is None else bucket_cap_mb)
                lists.append(last)
            last.append(p)
            rooms[p.dtype] = last, room - p.nbytes
        self.rows = [_Row(parameters, group) for parameters in lists]
        flatten = partial(_rows, self.rows)
        self.optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, flatten, group, **defaults)
        self._hook()

    def _hook(self):
        self.turn, self.complete = 0, [set() for _ in self.rows]
        me = weakref.ref(self)
        self.hooks = [
            p.register_post_accumulate_grad_hook(lambda p, n=n: me()._ready(n, p))
            for n, row in enumerate(self.rows)
            for p in row.parameters
        ]

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key not in ("hooks", "came", "turn")}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._hook()

    def __del__(self):
        for hook in vars(self).get("hooks", []):
            hook.remove()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _ready(self, index, p):
        self.done = False
        if p in self.complete[index]:
            raise RuntimeError("its gradient has been sent: finish_gradient_sync() must come first")
        if self.depth:
            return
        if p.grad.requires_grad:
            raise RuntimeError("create_graph=True is not supported")
        self.complete[index].add(p)
        while self.turn < len(self.rows) and len(self.complete[self.turn]) == len(self.rows[self.turn].parameters):
            self._next()

    def _next(self):
        if self.turn:
            self.rows[self.turn - 1].take()
        self.rows[self.turn].send()
        self.turn += 1

    def finish_gradient_sync(self):
        if self.depth:
            return
        while self.turn < len(self.rows):
            self._next()
        for row in self.rows:
            row.take()
        self.turn, self.complete, self.done = 0, [set() for _ in self.rows], True

    @contextlib.contextmanager
    def no_sync(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def clip_grad_norm_(self, max_norm):
        if not self.done:
            self.finish_gradient_sync()
        return self.optimizer.clip_grad_norm_(max_norm)

    def step(self):
        if not self.done:
            self.finish_gradient_sync()
        self.optimizer.step()
        self.done = False

    def zero_grad(self, set_to_none=True):
        self.turn, self.complete, self.done = 0, [set() for _ in self.rows], False
        for row in self.rows:
            row.take()
            row.drop()
