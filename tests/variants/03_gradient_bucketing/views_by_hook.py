"""Copies every gradient into its slice from a hook as soon as it is complete, and launches everything at the end.

`Bucket` divides in launch().
"""

import weakref

import torch
import torch.distributed as dist
from torch import nn


def flat_and_slices(parameters):
    flat = torch.cat([torch.zeros(p.numel(), dtype=p.dtype, device=p.device) for p in parameters])
    ends = torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()
    begins = [end - p.numel() for p, end in zip(parameters, ends, strict=True)]
    return flat, [flat[at : at + p.numel()].reshape(p.shape) for p, at in zip(parameters, begins, strict=True)]


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    queue = [p for p in parameters if p.requires_grad]
    by_kind = {}
    for order, p in enumerate(queue[::-1]):
        buckets = by_kind.setdefault((p.dtype, p.device), [])
        allowed = bucket_cap_mb if len(buckets) > 1 else min(bucket_cap_mb, first_bucket_mb)
        if buckets and buckets[-1][1] + p.nbytes <= allowed * 2**20:
            buckets[-1][1] += p.nbytes
            buckets[-1][2].append(p)
        else:
            buckets.append([order, p.nbytes, [p]])
    flattened = [bucket for buckets in by_kind.values() for bucket in buckets]
    return [members for _, _, members in sorted(flattened, key=lambda bucket: bucket[0])]


class Bucket:
    def __init__(self, parameters, group=None):
        self.parameters, self.group, self.works = parameters, group, []
        self.flat, self.slices = flat_and_slices(parameters)

    def pack(self, index):
        p, piece = self.parameters[index], self.slices[index]
        if p.grad is None:
            piece.zero_()
        elif p.grad.requires_grad:
            raise RuntimeError("backward(create_graph=True) leaves gradients that cannot be sent")
        elif p.grad is not piece:
            piece.copy_(p.grad)
        p.grad = piece

    def launch(self):
        self.flat /= dist.get_world_size(self.group)
        self.works.append(dist.all_reduce(self.flat, group=self.group, async_op=True))

    def wait(self):
        if not self.works:
            raise RuntimeError("call launch() first")
        self.works.pop().wait()


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.module, self.group, self.scale = module, group, 1 / dist.get_world_size(group)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [(*flat_and_slices(members), members) for members in assigned]
        self._hook()

    def _hook(self):
        me, handles = weakref.ref(self), []
        self.slice_of = {
            p: piece for _, pieces, members in self.buckets for p, piece in zip(members, pieces, strict=True)
        }
        for p in self.slice_of:
            handles.append(p.register_post_accumulate_grad_hook(lambda p: me() and me()._copy_into_slice(p)))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def __setstate__(self, state):
        super().__setstate__(state)
        self._hook()

    def _copy_into_slice(self, p):
        if p.grad is None:
            self.slice_of[p].zero_()
        elif p.grad.requires_grad:
            raise RuntimeError("backward(create_graph=True) leaves gradients that cannot be sent")
        elif p.grad.data_ptr() != self.slice_of[p].data_ptr():
            self.slice_of[p].copy_(p.grad)
        p.grad = self.slice_of[p]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_sync(self):
        for p in self.slice_of:
            self._copy_into_slice(p)
        works = []
        for flat, _, _ in self.buckets:
            flat.mul_(self.scale)
            works.append(dist.all_reduce(flat, group=self.group, async_op=True).get_future())
        torch.futures.wait_all(works) if works else None
