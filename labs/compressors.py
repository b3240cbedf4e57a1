"""Compressors that chapter 19's lesson uses before you have built them in its lab.

They take the shortest way: no group of ranks, one dtype, and no check of anything. `OverlappedDDP(module,
compressor=Int8())` calls new_bucket(), and then the bucket's pack(), launch() and wait().
"""

import torch
import torch.distributed as dist

from solutions.async_collectives import launch_all_gather

BLOCK = 256  # elements that share a scale


def quantize(values):
    """Return an integer for each element, and a scale for each block. Shape: [..., n], [..., n / BLOCK]."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).clamp(min=1e-37)
    integers = (blocks / scales[..., None]).round().to(torch.int8)
    return integers.reshape(values.shape), scales


def dequantize(integers, scales):
    blocks = integers.reshape(*scales.shape, BLOCK)
    return (blocks * scales[..., None]).reshape(integers.shape)


def pack(integers, scales):
    """Put integers and scales into one tensor of bytes."""
    return torch.cat([integers, scales.view(torch.int8)], -1)


def unpack(message):
    numel = message.shape[-1] * BLOCK // (BLOCK + 4)
    return message[..., :numel], message[..., numel:].view(torch.float32)


class Bucket:
    """Sends what its compressor chooses of everything that is still unsent. `memory` is the compressor's."""

    def __init__(self, compressor, parameters, group=None):
        self.compressor, self.parameters, self.group = compressor, parameters, group
        self.flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        self.unsent, self.memory = torch.zeros_like(self.flat), {}
        sizes = [parameter.numel() for parameter in parameters]
        pieces = zip(self.flat.split(sizes), parameters, strict=True)
        self.slices = [piece.view_as(parameter) for piece, parameter in pieces]

    def pack(self, index):
        parameter, piece = self.parameters[index], self.slices[index]
        piece.copy_(torch.zeros_like(piece) if parameter.grad is None else parameter.grad)
        piece /= dist.get_world_size(self.group)
        parameter.grad = piece

    def launch(self):
        self.unsent += self.flat
        self.handles = self.compressor.exchange(self)
        self.first = next(self.handles)  # runs the generator up to its first collective

    def wait(self):
        self.first.wait()
        for handle in self.handles:
            handle.wait()


class Compressor:
    def new_bucket(self, parameters, group=None):
        return Bucket(self, parameters, group)


class Int8(Compressor):
    def exchange(self, bucket):
        rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
        n = len(bucket.unsent)
        shard = -(-n // (world_size * BLOCK)) * BLOCK  # elements that a rank adds up
        padded = torch.zeros(world_size, shard)
        padded.view(-1)[:n] = bucket.unsent
        sent = quantize(padded)
        bucket.unsent -= dequantize(*sent).view(-1)[:n]
        message = pack(*sent)
        received = torch.empty_like(message)
        yield dist.all_to_all_single(received, message, group=bucket.group, async_op=True)

        total = dequantize(*unpack(received)).sum(0)
        sent = quantize(total)
        lost = (total - dequantize(*sent))[: max(0, n - rank * shard)]
        bucket.unsent[rank * shard : rank * shard + len(lost)] += lost
        gathered = torch.empty_like(message)
        yield launch_all_gather(gathered.view(-1), pack(*sent), bucket.group)
        bucket.flat.copy_(dequantize(*unpack(gathered)).view(-1)[:n])


class TopK(Compressor):
    def __init__(self, share):
        self.share = share

    def exchange(self, bucket):
        count = max(1, round(self.share * len(bucket.unsent)))
        chosen = bucket.unsent.abs().topk(count).indices
        own = bucket.unsent[chosen], chosen.to(torch.int32)
        bucket.unsent[chosen] = 0
        everyones = [each.new_empty(dist.get_world_size(bucket.group) * count) for each in own]
        pairs = zip(everyones, own, strict=True)
        yield from [launch_all_gather(into, each, bucket.group) for into, each in pairs]
        values, indices = everyones
        bucket.flat.zero_().index_add_(0, indices, values)


class PowerSGD(Compressor):
    def __init__(self, rank):
        self.r = rank

    def exchange(self, bucket):
        views = bucket.unsent.split([p.numel() for p in bucket.parameters])
        views = [view.view(p.shape) for view, p in zip(views, bucket.parameters, strict=True)]
        matrices = [v for v in views if v.dim() == 2 and self.r * sum(v.shape) < v.numel()]
        others = [v for v in views if all(v is not m for m in matrices)]
        seeded = torch.Generator().manual_seed(0)  # the same Q on every rank
        qs = bucket.memory.get("qs") or [torch.randn(m.shape[1], self.r, generator=seeded) for m in matrices]
        parts = [m @ q for m, q in zip(matrices, qs, strict=True)] + others
        message = torch.cat([part.flatten() for part in parts])
        yield dist.all_reduce(message, group=bucket.group, async_op=True)

        sums = _split_like(message, parts)
        ps = [torch.linalg.qr(p).Q for p in sums[: len(matrices)]]
        own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        message = torch.cat([q.flatten() for q in own_qs] or [torch.zeros(1)])
        yield dist.all_reduce(message, group=bucket.group, async_op=True)
        bucket.memory["qs"] = _split_like(message, own_qs)

        totals = dict(zip(map(id, others), sums[len(matrices) :], strict=True))
        for m, p, own_q, q in zip(matrices, ps, own_qs, bucket.memory["qs"], strict=True):
            totals[id(m)] = p @ q.T
            m -= p @ own_q.T  # this is what this rank has sent
        for other in others:
            other.zero_()
        bucket.flat.copy_(torch.cat([totals[id(view)].flatten() for view in views]))


def _split_like(message, tensors):
    parts = message.split([tensor.numel() for tensor in tensors])[: len(tensors)]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
