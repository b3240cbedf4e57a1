"""Has one bucket class per method, sends integers and scales separately, and starts PowerSGD with orthonormal Q."""

import math

import torch
import torch.distributed as dist

from solutions.async_collectives import InFlight
from solutions.bucketed_ddp import Bucket


class _Keeping(Bucket):
    def __init__(self, parameters, group, option):
        super().__init__(parameters, group)
        self.option = option
        self.rest = self.flat.to(torch.promote_types(self.flat.dtype, torch.float32), copy=True)
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def launch(self):
        self.rest += self.flat
        self.handle = self.start()

    def wait(self):
        for work in self.handle:
            work.wait()
        self.end()
        self.handle = None

    def gather(self, tensor):
        into = [torch.empty_like(tensor) for _ in range(self.ranks)]
        return into, dist.all_gather(into, tensor.contiguous(), group=self.group, async_op=True)


class _Int8Bucket(_Keeping):
    def quantize(self, values):
        scales = (values.abs().amax(-1) / 127).float().clamp_min(1e-37)
        return (values / scales[..., None]).round().clamp(-127, 127).to(torch.int8), scales

    def start(self):
        per_rank = math.ceil(max(1, math.ceil(len(self.rest) / 256)) / self.ranks)
        self.padded = torch.zeros(self.ranks * per_rank * 256).to(self.rest)
        self.padded[: len(self.rest)] = self.rest
        self.sent = self.quantize(self.padded.view(self.ranks, per_rank, 256))
        self.padded -= (self.sent[0] * self.sent[1][..., None]).flatten()
        self.received = [torch.empty_like(each) for each in self.sent]
        works = []
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        for received, sent in zip(self.received, self.sent, strict=True):
            received[self.rank] = sent[self.rank]
            flat_in, flat_out = received.view(self.ranks, -1), sent.view(self.ranks, -1)
            receives, sends = [(flat_in[p], p) for p in others], [(flat_out[p], p) for p in others]
            works.append(InFlight(sends, receives, self.group))
        return works

    def end(self):
        integers, scales = self.received
        total = sum(integers[peer] * scales[peer][..., None] for peer in range(self.ranks))
        mine = self.quantize(total)
        self.padded.view(self.ranks, -1)[self.rank] += (total - mine[0] * mine[1][..., None]).flatten()
        self.rest = self.padded[: len(self.rest)].clone()
        gathered = [self.gather(each) for each in mine]
        for _, work in gathered:
            work.wait()
        shards = [i * s[..., None] for i, s in zip(gathered[0][0], gathered[1][0], strict=True)]
        self.flat.copy_(torch.cat([shard.flatten() for shard in shards])[: len(self.flat)])


class _TopKBucket(_Keeping):
    def start(self):
        count = max(1, round(self.option * len(self.rest)))
        indices = torch.topk(self.rest.square(), count, sorted=False).indices
        self.values, one = self.gather(self.rest[indices])
        self.indices, two = self.gather(indices.int())
        self.rest = self.rest.scatter(0, indices, 0.0)
        return [one, two]

    def end(self):
        total = torch.zeros_like(self.rest)
        for values, indices in zip(self.values, self.indices, strict=True):
            total = total + torch.zeros_like(total).scatter(0, indices.long(), values)
        self.flat.copy_(total)


class _PowerBucket(_Keeping):
    def start(self):
        self.wide = {}
        at = 0
        for number, parameter in enumerate(self.parameters):
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            columns = parameter.numel() // max(1, rows)
            if self.option * (rows + columns) < rows * columns:
                self.wide[number] = self.rest[at : at + rows * columns].view(rows, columns)
            at += parameter.numel()
        if not hasattr(self, "qs"):
            draws = torch.Generator().manual_seed(3)
            self.qs = {n: torch.randn(m.shape[1], self.option, generator=draws).to(m) for n, m in self.wide.items()}
        parts = self.rest.split([p.numel() for p in self.parameters])
        self.parts = [
            (self.wide[n] @ torch.linalg.qr(self.qs[n]).Q).flatten() if n in self.wide else part
            for n, part in enumerate(parts)
        ]
        self.message = torch.cat(self.parts)
        return [dist.all_reduce(self.message, group=self.group, async_op=True)]

    def end(self):
        sums = list(self.message.split([len(part) for part in self.parts]))
        ps = {n: torch.linalg.qr(sums[n].view(-1, self.option)).Q for n in self.wide}
        own = {n: m.T @ ps[n] for n, m in self.wide.items()}
        if own:
            message = torch.cat([q.flatten() for q in own.values()])
            dist.all_reduce(message, group=self.group, async_op=True).wait()
            split = message.split([q.numel() for q in own.values()])
            self.qs = {n: part.view_as(own[n]) for n, part in zip(own, split, strict=True)}
        left = [torch.zeros_like(part) for part in self.rest.split([p.numel() for p in self.parameters])]
        for n, m in self.wide.items():
            left[n] = (m - ps[n] @ own[n].T).flatten()
            sums[n] = (ps[n] @ self.qs[n].T).flatten()
        self.rest = torch.cat(left)
        self.flat.copy_(torch.cat(sums))


class Int8:
    def new_bucket(self, parameters, group=None):
        return _Int8Bucket(parameters, group, None)


class TopK:
    def __init__(self, ratio):
        self.ratio = ratio

    def new_bucket(self, parameters, group=None):
        return _TopKBucket(parameters, group, self.ratio)


class PowerSGD:
    def __init__(self, rank):
        self.rank = rank

    def new_bucket(self, parameters, group=None):
        return _PowerBucket(parameters, group, self.rank)
