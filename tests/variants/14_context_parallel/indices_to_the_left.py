"""Works with indices of tokens, and lets the keys travel to the left, in batches of its own.

A softmax of the log-sum-exp of both parts weighs them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.sharded.sequences import expect_attention_shards, expect_divisible, expect_equal_shards


def own_indices(rank, size, length, balanced):
    if not balanced:
        return torch.arange(length).view(size, -1)[rank]
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def shard_sequence(tensor, dim, group=None, balanced=True):
    size = dist.get_world_size(group)
    expect_divisible(tensor.shape[dim], (1 + balanced) * size, "the sequence")
    indices = own_indices(dist.get_rank(group), size, tensor.shape[dim], balanced)
    return tensor.index_select(dim, indices.to(tensor.device))


@torch.no_grad()
def unshard_sequence(tensor, dim, group=None, balanced=True):
    expect_equal_shards({"the shard": tensor}, group, dim, 1 + balanced)
    size = dist.get_world_size(group)
    shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    length = size * tensor.shape[dim]
    order = torch.cat([own_indices(rank, size, length, balanced) for rank in range(size)])
    return torch.cat(shards, dim).index_select(dim, order.argsort().to(tensor.device))


def visible_pairs(index, source, size, causal, balanced):
    mine, theirs = (own_indices(rank, size, 2 * size, balanced).tolist() for rank in (index, source))
    if not balanced:
        mine, theirs = [index], [source]
    found = []
    for j in range(len(theirs)):
        for i in range(len(mine)):
            if causal and theirs[j] > mine[i]:
                continue
            found.append((i, j, bool(causal and theirs[j] == mine[i])))
    return found


def merge(output, log_sum, other_output, other_log_sum):
    log_sums = torch.stack([log_sum, other_log_sum])
    weights = log_sums.softmax(0)
    return (weights * torch.stack([output, other_output])).sum(0), log_sums.logsumexp(0)


def exchange(tensor, to, source, group):
    received = torch.empty_like(tensor)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=source)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=to)
    return received, dist.batch_isend_irecv([receive, send])


def wait(works):
    for work in works:
        work.wait()


def scores_of(query, key, hidden):
    scores = torch.matmul(query, key.transpose(-2, -1)) / query.shape[-1] ** 0.5
    if hidden:
        size = scores.shape[-1]
        positions = torch.arange(size, device=scores.device)
        scores = scores.masked_fill(positions[None] > positions[:, None], -torch.inf)
    return scores


def wide(tensor):
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def ring_forward(query, key, value, group, causal, balanced):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, origin = (rank - 1) % size, (rank + 1) % size
    chunks = 2 if balanced else 1
    queries = wide(query).chunk(chunks, 2)
    found = {}
    block = torch.stack((key, value), dim=0)
    for step in range(size):
        works = []
        if step + 1 < size:
            arriving, works = exchange(block, to, origin, group)
        keys, values = (wide(each).chunk(chunks, 2) for each in block)
        for i, j, hidden in visible_pairs(rank, (rank + step) % size, size, causal, balanced):
            scores = scores_of(queries[i], keys[j], hidden)
            part = scores.softmax(-1) @ values[j], scores.logsumexp(-1, keepdim=True)
            found[i] = merge(*found[i], *part) if i in found else part
        wait(works)
        if step + 1 < size:
            block = arriving
    return tuple(torch.cat([found[i][which] for i in range(chunks)], 2) for which in (0, 1))


class LeftRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, causal, balanced):
        output, log_sum = ring_forward(q, k, v, group, causal, balanced)
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.rest = group, causal, balanced
        return output.to(q.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (q, k, v, output, log_sum), (group, causal, balanced) = ctx.saved_tensors, ctx.rest
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        to, origin = (rank - 1) % size, (rank + 1) % size
        chunks = 2 if balanced else 1
        gradient = wide(gradient)
        delta = torch.einsum("bhtd,bhtd->bht", gradient, output)[..., None]
        per_chunk = [each.chunk(chunks, 2) for each in (wide(q), gradient, log_sum, delta)]
        of_query = torch.zeros_like(gradient)
        block, in_flight, works_of_gradients = torch.stack((k, v)), None, []
        for step in range(size):
            works = []
            if step + 1 < size:
                arriving, works = exchange(block, to, origin, group)
            keys, values = (wide(each).chunk(chunks, 2) for each in block)
            total = torch.zeros(block.shape, dtype=gradient.dtype, device=block.device)
            of_keys, of_values = (each.chunk(chunks, 2) for each in total)
            for i, j, hidden in visible_pairs(rank, (rank + step) % size, size, causal, balanced):
                query, grad, lse, summed = (each[i] for each in per_chunk)
                weights = torch.exp(scores_of(query, keys[j], hidden) - lse)
                of_values[j].add_(weights.transpose(-2, -1) @ grad)
                of_scores = weights * (grad @ values[j].transpose(-2, -1) - summed) / query.shape[-1] ** 0.5
                of_query.chunk(chunks, 2)[i].add_(of_scores @ keys[j])
                of_keys[j].add_(of_scores.transpose(-2, -1) @ query)
            wait(works_of_gradients)
            if in_flight is not None:
                total = total + in_flight
            if size > 1:
                kept = total  # in flight until the next wait
                in_flight, works_of_gradients = exchange(kept, to, origin, group)
            wait(works)
            block = arriving if step + 1 < size else block
        wait(works_of_gradients)
        of_key, of_value = total if size == 1 else in_flight
        return of_query.to(q.dtype), of_key.to(q.dtype), of_value.to(q.dtype), None, None, None


def ring_attention(q, k, v, group=None, causal=True, balanced=True):
    expect_attention_shards(q, k, v, group, 1 + balanced, causal=causal, balanced=balanced)
    return LeftRing.apply(q, k, v, group, causal, balanced)


class Regroup(torch.autograd.Function):
    """Exchanges tokens and heads of several tensors with one all-to-all."""

    @staticmethod
    def forward(ctx, stacked, to_heads, group):  # [S, B, H, T, D]
        ctx.rest = to_heads, group
        return regroup(stacked, to_heads, group)

    @staticmethod
    def backward(ctx, gradient):
        to_heads, group = ctx.rest
        return regroup(gradient, not to_heads, group), None, None


def regroup(stacked, to_heads, group):
    size = dist.get_world_size(group)
    split, joined = (2, 3) if to_heads else (3, 2)
    parts = stacked.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)


def all_to_all_attention(q, k, v, group=None, causal=True):
    expect_attention_shards(q, k, v, group, heads_divide=True, causal=causal)
    query, key, value = Regroup.apply(torch.stack((q, k, v)), True, group)
    scores = scores_of(query, key, causal)
    return Regroup.apply((scores.softmax(-1) @ value)[None], False, group)[0]


class ContextParallelGPT(nn.Module):
    """Counts the targets with a collective, as a rank must that gets only its own."""

    def __init__(self, gpt, group=None, balanced=True):
        super().__init__()
        self.gpt, self.group, self.balanced = gpt, group, balanced

    def attend(self, q, k, v):
        return ring_attention(q, k, v, self.group, True, self.balanced)

    def forward(self, tokens, targets):
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        own = own_indices(rank, size, tokens.shape[1], self.balanced).to(tokens.device)
        logits = self.gpt(tokens[:, own], None, own, self.attend)
        losses = F.cross_entropy(logits.transpose(1, 2), targets[:, own], reduction="none")
        both = torch.stack([losses.detach().sum(), (targets[:, own] != -100).sum().to(losses.dtype)])
        dist.all_reduce(both, group=self.group)
        mine = losses.sum() / both[1]
        return mine + (both[0] / both[1] - mine.detach())

    def finish_gradient_sync(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.group)
