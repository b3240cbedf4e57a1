"""Leaves P zero if this rank has not used a matrix, although other ranks have.

caught by: PowerSGD · parameters
"""

import torch
import torch.distributed as dist

from solutions import compression as right


class PowerSGD(right.Compressor):
    def __init__(self, rank):
        self.rank = rank

    def exchange(self, bucket):
        matrices, others = right.split_views(bucket.unsent, bucket, self.rank)
        qs = bucket.memory.get("qs") or right.first_qs(matrices, self.rank)
        ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
        message = torch.cat([each.flatten() for each in (*ps, *others)])
        yield dist.all_reduce(message, group=bucket.group, async_op=True)

        sums = right.shaped(message, [each.shape for each in (*ps, *others)])
        ps = [right.orthogonalize(p) if m.any() else p.zero_() for m, p in zip(matrices, sums, strict=False)]
        own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        if matrices:
            message = torch.cat([q.flatten() for q in own_qs])
            yield dist.all_reduce(message, group=bucket.group, async_op=True)
            qs = bucket.memory["qs"] = right.shaped(message, [q.shape for q in own_qs])

        for m, p, q in zip(matrices, ps, own_qs, strict=True):
            m -= p @ q.T
        for each in others:
            each.zero_()
        results = right.split_views(bucket.flat, bucket, self.rank)
        totals = [p @ q.T for p, q in zip(ps, qs, strict=True)] + sums[len(ps) :]
        for result, total in zip(results[0] + results[1], totals, strict=True):
            result.copy_(total)
