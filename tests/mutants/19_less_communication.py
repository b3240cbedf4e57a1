"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch
import torch.distributed as dist

from solutions import compression


def int8_gathers_in_float32():
    """Gathers the sums in float32.

    caught by: Int8 · wire
    """

    def dequantized(message):
        return compression.dequantize(*compression.unpack(message))

    class Int8(compression.Compressor):
        def exchange(self, bucket):
            rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
            unsent, numel = bucket.unsent, compression.shard_numel(bucket)
            rows = unsent.new_zeros(world_size, numel)
            rows.view(-1)[: unsent.numel()] = unsent
            message = compression.pack(*compression.quantize(rows))
            unsent -= dequantized(message).view(-1)[: unsent.numel()]
            received, handle = compression.all_to_all(message, bucket.group)
            yield handle

            total = dequantized(received).sum(0)
            shard = compression.pack(*compression.quantize(total))
            own = unsent[rank * numel : (rank + 1) * numel]
            own += (total - dequantized(shard))[: len(own)]
            gathered = total.new_empty(world_size, numel)
            yield compression.launch_all_gather(gathered.view(-1), dequantized(shard), bucket.group)

            bucket.flat.copy_(gathered.view(-1)[: unsent.numel()])


def int8_keeps_one_rest():
    """Keeps what is unsent on the compressor, one tensor for each length of a bucket.

    caught by: Int8 · two models
    """

    class Int8(compression.Int8):
        def __init__(self):
            self.unsent = {}

        def exchange(self, bucket):
            new = bucket.flat.to(bucket.unsent)
            bucket.unsent = self.unsent.setdefault(len(new), torch.zeros_like(new))
            bucket.unsent += new
            return super().exchange(bucket)


def int8_over_the_world():
    """Sends to all ranks instead of the group's.

    caught by: Int8 · group
    """

    def dequantized(message):
        return compression.dequantize(*compression.unpack(message))

    class Int8(compression.Compressor):
        def exchange(self, bucket):
            rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
            unsent, numel = bucket.unsent, compression.shard_numel(bucket)
            rows = unsent.new_zeros(world_size, numel)
            rows.view(-1)[: unsent.numel()] = unsent
            message = compression.pack(*compression.quantize(rows))
            unsent -= dequantized(message).view(-1)[: unsent.numel()]
            received, handle = compression.all_to_all(message, None)
            yield handle

            total = dequantized(received).sum(0)
            shard = compression.pack(*compression.quantize(total))
            own = unsent[rank * numel : (rank + 1) * numel]
            own += (total - dequantized(shard))[: len(own)]
            gathered = torch.empty_like(message)
            yield compression.launch_all_gather(gathered.view(-1), shard, bucket.group)

            bucket.flat.copy_(dequantized(gathered).view(-1)[: unsent.numel()])


def int8_waits_before_it_yields():
    """Waits for the all-to-all before it yields.

    caught by: Int8 · wire
    """

    def dequantized(message):
        return compression.dequantize(*compression.unpack(message))

    class Int8(compression.Compressor):
        def exchange(self, bucket):
            rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
            unsent, numel = bucket.unsent, compression.shard_numel(bucket)
            rows = unsent.new_zeros(world_size, numel)
            rows.view(-1)[: unsent.numel()] = unsent
            message = compression.pack(*compression.quantize(rows))
            unsent -= dequantized(message).view(-1)[: unsent.numel()]
            received, handle = compression.all_to_all(message, bucket.group)
            handle.wait()
            yield handle

            total = dequantized(received).sum(0)
            shard = compression.pack(*compression.quantize(total))
            own = unsent[rank * numel : (rank + 1) * numel]
            own += (total - dequantized(shard))[: len(own)]
            gathered = torch.empty_like(message)
            yield compression.launch_all_gather(gathered.view(-1), shard, bucket.group)

            bucket.flat.copy_(dequantized(gathered).view(-1)[: unsent.numel()])


def int8_with_one_scale_per_bucket():
    """Gives all blocks of a rank's bucket the same scale.

    caught by: Int8 · outliers
    """

    def quantized(values):
        largest = values.abs().amax() / 127
        scales = (
            largest.float()
            .clamp(min=compression.TINY)
            .expand(*values.shape[:-1], values.shape[-1] // compression.BLOCK)
        )
        return (values / scales.flatten()[0]).round().to(torch.int8), scales

    def dequantized(message):
        return compression.dequantize(*compression.unpack(message))

    class Int8(compression.Compressor):
        def exchange(self, bucket):
            rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
            unsent, numel = bucket.unsent, compression.shard_numel(bucket)
            rows = unsent.new_zeros(world_size, numel)
            rows.view(-1)[: unsent.numel()] = unsent
            message = compression.pack(*quantized(rows))
            unsent -= dequantized(message).view(-1)[: unsent.numel()]
            received, handle = compression.all_to_all(message, bucket.group)
            yield handle

            total = dequantized(received).sum(0)
            shard = compression.pack(*quantized(total))
            own = unsent[rank * numel : (rank + 1) * numel]
            own += (total - dequantized(shard))[: len(own)]
            gathered = torch.empty_like(message)
            yield compression.launch_all_gather(gathered.view(-1), shard, bucket.group)

            bucket.flat.copy_(dequantized(gathered).view(-1)[: unsent.numel()])


def power_keeps_q_on_the_compressor():
    """Keeps the Q on the compressor, by their shapes, so buckets share them.

    caught by: PowerSGD · two models
    """

    class PowerSGD(compression.Compressor):
        def __init__(self, rank):
            self.rank, self.qs = rank, {}

        def key(self, matrices):
            return tuple(m.shape for m in matrices)

        def exchange(self, bucket):
            matrices, others = compression.split_views(bucket.unsent, bucket, self.rank)
            qs = self.qs.get(self.key(matrices)) or compression.first_qs(matrices, self.rank)
            ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
            message = torch.cat([each.flatten() for each in (*ps, *others)])
            yield dist.all_reduce(message, group=bucket.group, async_op=True)

            sums = compression.shaped(message, [each.shape for each in (*ps, *others)])
            ps = [compression.orthogonalize(p) for p in sums[: len(ps)]]
            own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
            if matrices:
                message = torch.cat([q.flatten() for q in own_qs])
                yield dist.all_reduce(message, group=bucket.group, async_op=True)
                qs = self.qs[self.key(matrices)] = compression.shaped(message, [q.shape for q in own_qs])

            for m, p, q in zip(matrices, ps, own_qs, strict=True):
                m -= p @ q.T
            for each in others:
                each.zero_()
            results = compression.split_views(bucket.flat, bucket, self.rank)
            totals = [p @ q.T for p, q in zip(ps, qs, strict=True)] + sums[len(ps) :]
            for result, total in zip(results[0] + results[1], totals, strict=True):
                result.copy_(total)
