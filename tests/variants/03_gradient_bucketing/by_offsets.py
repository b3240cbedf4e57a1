"""Keeps the free bytes of each bucket in a dict, finds slices by their offsets, and packs flat views in place."""

import torch
import torch.distributed as dist

from solutions.bucketed_ddp import BucketedDDP  # noqa: F401

MB = 2**20


def flat_and_slices(parameters):
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    slices, offset = [], 0
    for p in parameters:
        slices.append(flat[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
    return flat, slices


def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    cap = bucket_cap_mb * MB
    buckets, current, room = [], {}, {}
    for p in reversed(list(parameters)):
        if not p.requires_grad:
            continue
        key, size = (p.dtype, p.device), p.numel() * p.element_size()
        if key not in current or size > room[key]:
            room[key] = min(first_bucket_mb * MB, cap) if key not in current else cap
            current[key] = []
            buckets.append(current[key])
        current[key].append(p)
        room[key] -= size
    return buckets


class Bucket:
    def __init__(self, parameters, group=None):
        self.parameters, self.group = parameters, group
        self.flat, self.slices = flat_and_slices(parameters)
        self.work = None

    def pack(self, index):
        parameter, flat_slice = self.parameters[index], self.slices[index].view(-1)
        if getattr(parameter.grad, "requires_grad", False):
            raise RuntimeError("an all-reduce is not part of a graph")
        if parameter.grad is None:
            flat_slice.zero_()
        elif parameter.grad is not self.slices[index]:
            flat_slice.copy_(parameter.grad.reshape(-1))
        parameter.grad = self.slices[index]
        parameter.grad /= dist.get_world_size(self.group)

    def launch(self):
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self):
        if self.work is None:
            raise RuntimeError("no all-reduce in flight")
        self.work.wait()
        self.work = None
