"""Keeps the two errors of Int8 apart, gathers bytes in TopK, and in PowerSGD keeps the distance to the mean.

A bucket has closures instead of a generator. P is made orthonormal by Gram and Schmidt's method.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions.bucketed_ddp import Bucket

BLOCK = 256


class _Bucket(Bucket):
    def __init__(self, parameters, group, begin):
        super().__init__(parameters, group)
        self.begin = begin
        self.error = torch.zeros(len(self.flat), dtype=torch.promote_types(self.flat.dtype, torch.float32))
        self.error = self.error.to(self.flat.device)
        self.kept = None
        self.following = []

    def launch(self):
        self.handle, self.following = self.begin(self, self.error + self.flat)

    def wait(self):
        handle = self.handle
        for then in self.following:
            handle.wait()
            handle = then()
        self.handle, self.following = None, []


class _Compressor:
    def new_bucket(self, parameters, group=None):
        return _Bucket(parameters, group, self.begin)


def _rounded(values):
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    scales = blocks.abs().max(dim=-1).values.div(127).float()
    scales[scales == 0] = 1
    return torch.round(blocks / scales[..., None]).clamp(-127, 127).char(), scales


def _restored(integers, scales):
    return (integers.float() * scales[..., None]).flatten(-2)


def _bytes(integers, scales):
    return torch.cat([scales.contiguous().view(torch.uint8), integers.flatten(-2).view(torch.uint8)], -1)


def _unbytes(message):
    scales = message.shape[-1] // (BLOCK + 4) * 4
    integers = message[..., scales:].contiguous().view(torch.int8)
    return integers.unflatten(-1, (-1, BLOCK)), message[..., :scales].contiguous().view(torch.float32)


class Int8(_Compressor):
    def begin(self, bucket, corrected):
        world_size, length = dist.get_world_size(bucket.group), len(corrected)
        blocks = max(1, -(-length // BLOCK))
        rows = F.pad(corrected, (0, -(-blocks // world_size) * world_size * BLOCK - length)).view(world_size, -1)
        sent = _rounded(rows)
        bucket.error = (rows - _restored(*sent)).flatten()[:length]
        outgoing = _bytes(*sent)
        incoming = torch.empty_like(outgoing)
        work = dist.all_to_all_single(incoming, outgoing, group=bucket.group, async_op=True)
        gathered = torch.empty_like(outgoing)

        def add_up():
            total = _restored(*_unbytes(incoming)).sum(0)
            if bucket.kept is not None:
                total += bucket.kept
            mine = _rounded(total)
            bucket.kept = total - _restored(*mine)
            return dist.all_gather(list(gathered), _bytes(*mine), group=bucket.group, async_op=True)

        def finish():
            bucket.flat.copy_(_restored(*_unbytes(gathered)).flatten()[:length])

        return work, [add_up, finish]


class TopK(_Compressor):
    def __init__(self, ratio):
        self.ratio = ratio

    def begin(self, bucket, corrected):
        count = max(1, round(self.ratio * len(corrected)))
        chosen = corrected.abs().argsort(descending=True)[:count]
        values = corrected[chosen]
        bucket.error = corrected.index_fill(0, chosen, 0)
        message = torch.cat([values.view(torch.uint8), chosen.int().view(torch.uint8)])
        messages = [torch.empty_like(message) for _ in range(dist.get_world_size(bucket.group))]
        work = dist.all_gather(messages, message, group=bucket.group, async_op=True)

        def finish():
            total = torch.zeros_like(corrected)
            split = count * corrected.dtype.itemsize
            for each in messages:
                own, indices = each[:split].clone().view(corrected.dtype), each[split:].clone().view(torch.int32)
                total.index_add_(0, indices.long(), own)
            bucket.flat.copy_(total)

        return work, [finish]


def _orthonormal(p):
    columns = []
    for column in p.unbind(1):
        for _ in range(2):  # once is not enough if columns are almost parallel
            for other in columns:
                column = column - (other @ column) * other
        columns.append(column / (column.norm() + 1e-30))
    return torch.stack(columns, 1)


class PowerSGD(_Compressor):
    def __init__(self, rank):
        self.rank = rank

    def begin(self, bucket, corrected):
        world_size, sizes = dist.get_world_size(bucket.group), [p.numel() for p in bucket.parameters]
        views, small, large = corrected.split(sizes), [], []
        for parameter, view in zip(bucket.parameters, views, strict=True):
            matrix = view.view(parameter.shape[0], -1) if parameter.dim() > 1 and view.numel() else view.view(1, -1)
            (large if self.rank * sum(matrix.shape) < matrix.numel() else small).append(matrix)
        if bucket.kept is None:
            generator = torch.Generator().manual_seed(17)
            bucket.kept = [torch.rand(m.shape[1], self.rank, generator=generator).to(m) - 0.5 for m in large]
        ps = [m @ q for m, q in zip(large, bucket.kept, strict=True)]
        first = torch.cat([each.flatten() for each in small + ps])
        second = torch.empty(sum(q.numel() for q in bucket.kept)).to(corrected)
        work = dist.all_reduce(first, group=bucket.group, async_op=True)

        def project():
            parts = first.split([each.numel() for each in small + ps])
            for each, part in zip(small + ps, parts, strict=True):
                each.copy_(part.view_as(each))
            ps[:] = [_orthonormal(p) for p in ps]
            second.copy_(torch.cat([(m.T @ p).flatten() for m, p in zip(large, ps, strict=True)]))
            return dist.all_reduce(second, group=bucket.group, async_op=True)

        def finish():
            if large:
                parts = second.split([q.numel() for q in bucket.kept])
                bucket.kept = [part.view_as(q).clone() for part, q in zip(parts, bucket.kept, strict=True)]
            error = corrected.clone()
            for m, p, q in zip(large, ps, bucket.kept, strict=True):
                m.copy_(p @ q.T)
            bucket.flat.copy_(corrected)
            # The mean of these is what the mean gradient has lost. Vectors lose nothing.
            bucket.error = error - corrected / world_size
            for view, parameter in zip(bucket.error.split(sizes), bucket.parameters, strict=True):
                shape = (len(parameter), -1) if parameter.dim() > 1 and view.numel() else (1, -1)
                if self.rank * sum(view.view(shape).shape) >= view.numel():
                    view.zero_()

        if not large:

            def take():
                corrected.copy_(torch.cat([part.flatten() for part in first.split([each.numel() for each in small])]))
                bucket.flat.copy_(corrected)
                bucket.error = torch.zeros_like(corrected)

            return work, [take]
        return work, [project, finish]
