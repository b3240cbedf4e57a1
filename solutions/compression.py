# Built by `make notebooks` from source/19_less_communication/lab.py: edit that, not this.
"""Gradient compression: OverlappedDDP(module, compressor=Int8()) sends fewer bytes than an all-reduce.

A compressor does not send everything. What it leaves out stays in the bucket, and is added to later gradients.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared import guards
from solutions.async_collectives import launch_all_gather
from solutions.bucketed_ddp import flat_and_slices, reject_graph

BLOCK = 256  # elements that share a scale

TINY = torch.finfo(torch.float32).tiny


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round each block to multiples of its scale, the block's largest absolute value / 127.

    Returns:
        The multiples, in int8, and the scales, in float32.

    Shape: values [..., n]; the multiples [..., n], the scales [..., n / BLOCK].
    """
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).float().clamp(min=TINY)
    integers = (blocks / scales).round().to(torch.int8)
    return integers.flatten(-2), scales.squeeze(-1)


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """Return the values that quantize() has rounded to, in float32.

    Shape: integers [..., n], scales [..., n / BLOCK]; returns [..., n].
    """
    return (integers.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(-2)


def pack(integers: Tensor, scales: Tensor) -> Tensor:
    """Put integers and scales into one int8 tensor: a scale is 4 of its elements.

    Shape: integers [..., n], scales [..., m]; returns [..., n + 4m].
    """
    return torch.cat([integers, scales.contiguous().view(torch.int8)], dim=-1)


def unpack(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of a packed message, or of several.

    Shape: message [..., n + 4m]; returns [..., n] and [..., m].
    """
    numel = message.shape[-1] * BLOCK // (BLOCK + 4)
    return message[..., :numel], message[..., numel:].view(torch.float32)


class FlatBucket:
    """Packs gradients, divided by the number of ranks, into the slices of a flat tensor, like lab 03's Bucket."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group, self.handle = parameters, group, None
        self.flat, self.slices = flat_and_slices(parameters)

    def pack(self, index: int) -> None:
        """Fill the slice of parameters[index] with its gradient, or zeros for None, and make it the .grad."""
        parameter, grad_slice = self.parameters[index], self.slices[index]
        reject_graph(parameter.grad)
        if parameter.grad is None:
            grad_slice.fill_(guards.UNUSED)  # [Note: negative zeros]
        else:
            torch.div(parameter.grad, dist.get_world_size(self.group), out=grad_slice)
        parameter.grad = grad_slice


def forget_overflow(bucket: "CompressedBucket") -> None:
    """After inf or NaN on any rank, keep neither for later steps. All ranks do so, because flat is the same."""
    if not bucket.flat.sum().isfinite():
        bucket.unsent.nan_to_num_(0, 0, 0)
        bucket.memory.clear()


class CompressedBucket(FlatBucket):
    """A bucket that sends what its compressor chooses, and keeps the rest in `unsent`, which papers call the *error*.

    `memory` is for the compressor: it can keep there what it needs in the next step.

    Memory: `unsent` is as large as the gradients, in float32 if they are in bf16.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None,
        compressor: "Compressor",
    ):
        super().__init__(parameters, group)
        self.compressor, self.stages, self.memory = compressor, None, {}
        # bf16 would round away what is small compared to the rest.
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        self.unsent = torch.zeros_like(self.flat, dtype=dtype)

    def launch(self) -> None:
        """Add the gradients to what is unsent, launch the compressor's first collective, and return at once."""
        self.unsent += self.flat
        self.stages = self.compressor.exchange(self)
        self.handle = next(self.stages)

    def wait(self) -> None:
        """Wait until flat is the sum of what all ranks have sent. Raises RuntimeError if nothing is in flight."""
        if self.handle is None:
            raise RuntimeError("nothing is in flight: call launch() before wait()")
        self.handle.wait()
        for handle in self.stages:
            handle.wait()
        self.handle = self.stages = None
        forget_overflow(self)


class Compressor:
    """Decides what the buckets of OverlappedDDP send. Pass it as `compressor=`."""

    def new_bucket(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> CompressedBucket:
        """Make a bucket that uses this compressor."""
        if parameters[0].is_complex():
            raise ValueError("complex gradients cannot be compressed: leave out the compressor")
        return CompressedBucket(parameters, group, self)

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        """Send a part of bucket.unsent, subtract it there, and put the sum over the ranks into bucket.flat.

        A generator: it yields the handle of each collective, and continues when this collective is complete.
        """
        raise NotImplementedError


def shard_numel(bucket: CompressedBucket) -> int:
    """Return how many elements a rank adds up, padded to whole blocks."""
    blocks = max(1, -(-bucket.flat.numel() // BLOCK))
    return -(-blocks // dist.get_world_size(bucket.group)) * BLOCK


def all_to_all(rows: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work]:
    """Launch an all-to-all: rank r gets row r of every rank.

    Returns:
        The tensor that will hold the rows received, in the order of the ranks, and a handle.

    Shape: rows [N, n]; received [N, n].
    Communication: one all-to-all; each rank sends (N−1)/N of the rows' bytes.
    """
    received = torch.empty_like(rows)
    return received, dist.all_to_all_single(received, rows, group=group, async_op=True)


class Int8(Compressor):
    """Sends 8-bit integers and a scale per block. Sums are computed in float32, and quantized again.

    Communication: an all-to-all in backward, and an all-gather afterwards. Each rank sends 2(N−1)/N · (1 + 4/BLOCK)
        bytes per element.
    Source: ZeRO++ (Wang et al. 2023) averages int4 gradients by all-to-all; 1-bit Adam (Tang et al. 2021) keeps both
        errors.
    """

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
        unsent, numel = bucket.unsent, shard_numel(bucket)
        rows = unsent.new_zeros(world_size, numel)
        rows.view(-1)[: unsent.numel()] = unsent
        message = pack(*quantize(rows))
        # What rounding has changed stays unsent on this rank.
        unsent -= dequantize(*unpack(message)).view(-1)[: unsent.numel()]
        received, handle = all_to_all(message, bucket.group)
        yield handle

        total = dequantize(*unpack(received)).sum(0)
        shard = pack(*quantize(total))
        # So does what rounding has changed in the sum, because no other rank knows it.
        own = unsent[rank * numel : (rank + 1) * numel]
        own += (total - dequantize(*unpack(shard)))[: len(own)]
        gathered = torch.empty_like(message)
        yield launch_all_gather(gathered.view(-1), shard, bucket.group)

        bucket.flat.copy_(dequantize(*unpack(gathered)).view(-1)[: unsent.numel()])


class TopK(Compressor):
    """Sends the elements with the largest absolute values: `ratio` of each bucket, but at least one.

    Communication: two all-gathers in backward. Each rank sends (N−1)(w + 4) bytes per chosen element of w bytes.
    Source: Aji and Heafield 2017, and Stich et al. 2018 for the error feedback.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        unsent, world_size = bucket.unsent, dist.get_world_size(bucket.group)
        count = min(unsent.numel(), max(1, round(self.ratio * unsent.numel())))
        indices = unsent.abs().topk(count).indices
        values = unsent[indices]
        unsent[indices] = 0
        all_values = values.new_empty(world_size, count)
        all_indices = indices.new_empty(world_size, count, dtype=torch.int32)
        first = launch_all_gather(all_values.view(-1), values, bucket.group)
        second = launch_all_gather(all_indices.view(-1), indices.int(), bucket.group)
        yield first
        yield second

        total = torch.zeros_like(unsent)
        for values, indices in zip(all_values, all_indices.long(), strict=True):
            total[indices] += values  # rank by rank, so that all ranks get the same bits
        bucket.flat.copy_(total)


def split_views(flat: Tensor, bucket: CompressedBucket, r: int) -> tuple[list[Tensor], list[Tensor]]:
    """View the slices of a flat tensor: as matrices where P and Q have fewer elements, and all others as they are."""
    matrices, others = [], []
    slices = flat.split([parameter.numel() for parameter in bucket.parameters])
    for each, parameter in zip(slices, bucket.parameters, strict=True):
        rows = len(parameter) if parameter.dim() > 1 else 1
        columns = parameter.numel() // max(1, rows)
        if r * (rows + columns) < rows * columns:
            matrices.append(each.view(rows, columns))
        else:
            others.append(each)
    return matrices, others


def first_qs(matrices: Sequence[Tensor], r: int) -> list[Tensor]:
    """Draw a random Q for each matrix, the same on every rank, without using torch's global random numbers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(m.shape[1], r, generator=generator).to(m) for m in matrices]


def orthogonalize(p: Tensor) -> Tensor:
    """Return a matrix with orthonormal columns that span those of p, even if p is zero."""
    return torch.linalg.qr(p).Q


def shaped(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split a one-dimensional tensor into tensors of these shapes."""
    sizes = [torch.Size(shape) for shape in shapes]
    parts = message.split([size.numel() for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


class PowerSGD(Compressor):
    """Approximates each matrix by P·Qᵀ with `rank` columns, and sends P and Q.

    Communication: an all-reduce in backward, of all P and of what is not compressed, and one of all Q afterwards.
    Memory: the Q of each matrix stay until the next step.
    Source: Vogels et al., NeurIPS 2019 (arXiv 1905.13727), algorithms 1 and 2.
    """

    def __init__(self, rank: int):
        self.r = rank

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        matrices, others = split_views(bucket.unsent, bucket, self.r)
        qs = bucket.memory.get("qs") or first_qs(matrices, self.r)
        ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
        message = torch.cat([each.flatten() for each in (*ps, *others)])
        yield dist.all_reduce(message, group=bucket.group, async_op=True)

        sums = shaped(message, [each.shape for each in (*ps, *others)])
        ps = [orthogonalize(p) for p in sums[: len(ps)]]
        own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        if matrices:
            message = torch.cat([q.flatten() for q in own_qs])
            yield dist.all_reduce(message, group=bucket.group, async_op=True)
            qs = bucket.memory["qs"] = shaped(message, [q.shape for q in own_qs])

        for m, p, q in zip(matrices, ps, own_qs, strict=True):
            m -= p @ q.T
        for each in others:
            each.zero_()
        results = split_views(bucket.flat, bucket, self.r)
        totals = [p @ q.T for p, q in zip(ps, qs, strict=True)] + sums[len(ps) :]
        for result, total in zip(results[0] + results[1], totals, strict=True):
            result.copy_(total)
