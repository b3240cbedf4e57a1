"""Turns blocks into rows, keeps the handles in a queue, adds by scatter_add_, and multiplies matrices into new ones."""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from solutions import compression as right
from solutions.async_collectives import launch_all_gather
from solutions.bucketed_ddp import Bucket

BLOCK = 256


def quantize(values):
    rows = values.reshape(-1, BLOCK)
    scales = torch.stack([row.abs().max() for row in rows]).div(127).float() if len(rows) else rows.new_zeros(0).float()
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    integers = torch.round(rows / scales[:, None]).to(torch.int8)
    return integers.view(values.shape), scales.view(*values.shape[:-1], values.shape[-1] // BLOCK)


def dequantize(integers, scales):
    return integers.float().mul(scales.repeat_interleave(BLOCK, dim=-1))


class CompressedBucket(Bucket):
    def __init__(self, parameters, group, compressor):
        super().__init__(parameters, group)
        self.compressor, self.memory, self.waiting = compressor, {}, None
        self.unsent = self.flat.detach().to(torch.promote_types(self.flat.dtype, torch.float32), copy=True)

    def launch(self):
        self.unsent = self.unsent.add_(self.flat)
        self.stages = iter(self.compressor.exchange(self))
        self.waiting = deque([next(self.stages)])

    def wait(self):
        if self.waiting is None:
            raise RuntimeError("launch() comes before wait()")
        while self.waiting:
            self.waiting.popleft().wait()
            self.waiting.extend([handle for handle in [next(self.stages, None)] if handle is not None])
        self.waiting = None


class _Compressor:
    def new_bucket(self, parameters: list[nn.Parameter], group=None):
        return CompressedBucket(parameters, group, self)


class Int8(_Compressor):
    def exchange(self, bucket):
        group, n = bucket.group, bucket.unsent.numel()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        length = right.shard_numel(bucket)
        rows = torch.zeros(size, length, device=bucket.flat.device)
        rows.flatten()[:n].copy_(bucket.unsent)
        sent = quantize(rows)
        residual = rows - dequantize(*sent)
        received, handle = right.all_to_all(right.pack(*sent), group)
        yield handle
        total = torch.zeros(length, device=rows.device)
        for message in received:
            total += dequantize(*right.unpack(message))
        mine = quantize(total)
        residual[rank] += total - dequantize(*mine)
        bucket.unsent.copy_(residual.flatten()[:n])
        message = right.pack(*mine)
        gathered = message.new_zeros(size * len(message))
        yield launch_all_gather(gathered, message, group)
        shards = [dequantize(*right.unpack(part)) for part in gathered.chunk(size)]
        bucket.flat.copy_(torch.cat(shards)[:n])


class TopK(_Compressor):
    def __init__(self, ratio):
        self.ratio = ratio

    def exchange(self, bucket):
        size, n = dist.get_world_size(bucket.group), len(bucket.unsent)
        count = max(round(n * self.ratio), 1)
        order = bucket.unsent.abs().sort(descending=True, stable=True).indices[:count]
        values = bucket.unsent.gather(0, order)
        bucket.unsent.scatter_(0, order, 0)
        tensors, handles = [], []
        for mine in (values, order.to(torch.int32)):
            tensors.append(mine.new_empty(size * count))
            handles.append(launch_all_gather(tensors[-1], mine, bucket.group))
        yield from handles
        total = torch.zeros_like(bucket.unsent)
        for at in range(0, size * count, count):
            total.scatter_add_(0, tensors[1][at : at + count].long(), tensors[0][at : at + count])
        bucket.flat[:] = total


class PowerSGD(_Compressor):
    def __init__(self, rank):
        self.columns = rank

    def exchange(self, bucket):
        matrices, others = right.split_views(bucket.unsent, bucket, self.columns)
        if "qs" not in bucket.memory:
            bucket.memory["qs"] = right.first_qs(matrices, self.columns)
        ps = [torch.einsum("nm,mr->nr", m, q) for m, q in zip(matrices, bucket.memory["qs"], strict=True)]
        shapes = [tensor.shape for tensor in ps + others]
        message = torch.cat([tensor.reshape(-1) for tensor in ps + others])
        torch._foreach_zero_(others) if others else None
        yield dist.all_reduce(message, group=bucket.group, async_op=True)
        sums = right.shaped(message, shapes)
        written = right.split_views(bucket.flat, bucket, self.columns)
        for view, total in zip(written[1], sums[len(ps) :], strict=True):
            view.copy_(total)
        if not matrices:
            return
        ps = [right.orthogonalize(total) for total in sums[: len(ps)]]
        own = [m.mT.matmul(p) for m, p in zip(matrices, ps, strict=True)]
        for m, p, q in zip(matrices, ps, own, strict=True):
            m.addmm_(p, q.mT, alpha=-1)
        message = torch.cat([q.reshape(-1) for q in own])
        yield dist.all_reduce(message, group=bucket.group, async_op=True)
        bucket.memory["qs"] = right.shaped(message, [q.shape for q in own])
        for view, p, q in zip(written[0], ps, bucket.memory["qs"], strict=True):
            torch.mm(p, q.mT, out=(product := torch.empty_like(p[:, :1].expand(-1, len(q)).contiguous())))
            view.copy_(product)
