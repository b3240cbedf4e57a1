"""Keeps one flat tensor per dtype, with buckets as slices of it, packs with foreach, and divides afterwards."""

import copy

import torch
import torch.distributed as dist
from torch import nn

MIB = 1 << 20


def flat_and_slices(parameters):
    first, start, slices = parameters[0], 0, []
    flat = first.new_zeros(sum(p.numel() for p in parameters), requires_grad=False)
    for parameter in parameters:
        slices.append(torch.narrow(flat, 0, start, parameter.numel()).reshape(parameter.shape))
        start += parameter.numel()
    return flat, slices


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    trainable = [p for p in parameters if p.requires_grad]
    trainable.reverse()
    cap, first = int(bucket_cap_mb * MIB), int(min(first_bucket_mb, bucket_cap_mb) * MIB)
    done, current, limit = [], {}, {}
    for p in trainable:
        key = (p.dtype, str(p.device))
        size = p.numel() * p.element_size()
        used = sum(q.numel() * q.element_size() for q in current.get(key, []))
        if key not in current or (used + size > limit[key]):
            limit[key] = first if key not in current else cap
            current[key] = []
            done.append(current[key])
        current[key] += [p]
    return done


class Bucket:
    def __init__(self, parameters, group=None):
        self.params, self.group, self.work = list(parameters), group, None
        self.flat, self.views = flat_and_slices(self.params)
        self.size = dist.get_world_size(group)

    def pack(self, index):
        p, view = self.params[index], self.views[index]
        if p.grad is not None and p.grad.requires_grad:
            raise RuntimeError("create_graph=True is not supported")
        with torch.no_grad():
            if p.grad is None:
                view.fill_(0)
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
        p.grad = view

    def launch(self):
        self.work = dist.all_reduce(self.flat, dist.ReduceOp.SUM, self.group, True)

    def wait(self):
        work, self.work = self.work, None
        if work is None:
            raise RuntimeError("there is no all-reduce to wait for")
        work.wait()
        self.flat.div_(self.size)


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.add_module("module", module)
        self.cap, self.group, self.size = bucket_cap_mb, group, dist.get_world_size(group)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, group=group, group_src=0)
        self._lay_out()

    def _lay_out(self):
        buckets = assign_buckets(self.module.parameters(), self.cap)
        kinds = list(dict.fromkeys(bucket[0].dtype for bucket in buckets))
        self.bucket_slices = [None] * len(buckets)
        for kind in kinds:
            indices = [index for index, bucket in enumerate(buckets) if bucket[0].dtype == kind]
            memory, pieces = flat_and_slices([p for index in indices for p in buckets[index]])
            pieces, start = iter(pieces), 0
            for index in indices:
                length = sum(p.numel() for p in buckets[index])
                views = [next(pieces) for _ in buckets[index]]
                self.bucket_slices[index] = (memory[start : start + length], buckets[index], views)
                start += length

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_sync(self):
        if any(p.grad is not None and p.grad.grad_fn is not None for p in self.module.parameters()):
            raise RuntimeError("create_graph=True is not supported")
        for _, parameters, views in self.bucket_slices:
            present = [(p, v) for p, v in zip(parameters, views, strict=True) if p.grad is not None]
            torch._foreach_zero_(
                [v for p, v in zip(parameters, views, strict=True) if p.grad is None] or [torch.empty(0)]
            )
            if present:
                torch._foreach_copy_([v for _, v in present], [p.grad for p, _ in present])
            for p, v in zip(parameters, views, strict=True):
                p.grad = v
        works = [
            dist.all_reduce(bucket_slice, group=self.group, async_op=True) for bucket_slice, _, _ in self.bucket_slices
        ]
        for work, (bucket_slice, _, _) in zip(works, self.bucket_slices, strict=True):
            work.wait()
            bucket_slice.div_(self.size)

    def __deepcopy__(self, memo):
        copied = BucketedDDP.__new__(BucketedDDP)
        nn.Module.__init__(copied)
        copied.module = copy.deepcopy(self.module, memo)
        copied.cap, copied.group, copied.size = self.cap, self.group, self.size
        copied._lay_out()
        return copied
