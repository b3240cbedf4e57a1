"""Hooks autograd's AccumulateGrad nodes, keeps all buckets in one table of slots, and divides before the all-reduce."""

import contextlib
import weakref

import torch
import torch.distributed as dist
from torch import nn


def on_gradients(parameters, on_gradient):
    nodes = [(p, torch.autograd.graph.get_gradient_edge(p).node) for p in dict.fromkeys(parameters) if p.requires_grad]
    handles = [node.register_hook(lambda *_, p=p: on_gradient(p)) for p, node in nodes]

    def end():
        for handle in handles:
            handle.remove()
        nodes.clear()  # Autograd creates a node again, without its hooks, once nothing references it.

    return end


class _Slots:
    """All buckets, and which of them are launched."""

    def __init__(self, parameters, cap_mb, group):
        self.group, self.size = group, dist.get_world_size(group)
        self.slots, sizes, open_buckets = {}, [], {}
        for parameter in reversed(parameters):
            kind, first = parameter.dtype, parameter.dtype not in open_buckets
            cap = 2**20 * cap_mb if not first else 2**20 * min(1.0, cap_mb)
            index, room = open_buckets.get(kind, (None, -1))
            if parameter.numel() * parameter.element_size() > room:
                index, room = len(sizes), cap
                sizes.append([0, parameter])
            self.slots[parameter] = index, sizes[index][0]
            sizes[index][0] += parameter.numel()
            open_buckets[kind] = index, room - parameter.numel() * parameter.element_size()
        self.flats = [torch.zeros(size, dtype=p.dtype, device=p.device) for size, p in sizes]
        self.reset()

    def reset(self):
        self.waiting_for = [{p for p, slot in self.slots.items() if slot[0] == n} for n in range(len(self.flats))]
        self.works = {}

    def pack(self, parameter):
        index, start = self.slots[parameter]
        piece = self.flats[index][start : start + parameter.numel()].view_as(parameter)
        if parameter.grad is None:
            piece.fill_(0)
        elif parameter.grad.data_ptr() != piece.data_ptr():
            piece.copy_(parameter.grad)
        parameter.grad = piece
        piece.mul_(1 / self.size)
        self.waiting_for[index].discard(parameter)

    def launch(self, all_buckets):
        for index, waiting in enumerate(self.waiting_for):
            if index in self.works:
                continue
            if waiting and not all_buckets:
                break
            for parameter in list(waiting):
                self.pack(parameter)
            self.works[index] = dist.all_reduce(self.flats[index], group=self.group, async_op=True)


class OverlappedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.add_module("module", module)
        self.arguments = bucket_cap_mb, group
        for tensor in [*module.buffers(), *module.parameters()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        self._attach()

    def _attach(self):
        cap_mb, group = self.arguments
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.slots, self.silence, self.state = _Slots(trainable, cap_mb, group), [], "no backward yet"
        me = weakref.ref(self)
        self.end = on_gradients(trainable, lambda parameter: me() and me()._on_gradient(parameter))
        weakref.finalize(self, self.end)

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key not in ("slots", "end", "silence", "state")}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._attach()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _on_gradient(self, parameter):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True cannot be had here")
        if self.silence:
            self.state = "accumulated"
            return
        if self.state != "in backward":
            self.state = "in backward"
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)
        self.slots.pack(parameter)
        self.slots.launch(False)

    def finish_gradient_sync(self):
        if self.silence:
            return
        if self.state != "complete":
            self._complete()
        self.state = "no backward yet"

    def _complete(self):
        self.state = "complete"
        self.slots.launch(True)
        for work in self.slots.works.values():
            work.wait()
        self.slots.reset()

    def no_sync(self):
        @contextlib.contextmanager
        def silent():
            self.silence.append(True)
            try:
                yield
            finally:
                self.silence.pop()

        return silent()
