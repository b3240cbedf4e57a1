"""A generator yields one block of keys after another, einsum multiplies, and hooks add up the gradients.

All queries of a rank that see anything of a block meet it at once, with one mask of positions.
"""

from itertools import groupby

import torch
import torch.distributed as dist
from torch import einsum, nn
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from shared.sharded.sequences import expect_attention_shards, expect_divisible, expect_equal_shards


def numbers(index, size, balanced):
    return [index, 2 * size - index - 1][: 1 + balanced]


def shard_sequence(tensor, dim, group=None, balanced=True):
    index, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = len(numbers(0, size, balanced)) * size
    expect_divisible(tensor.shape[dim], chunks, "the sequence")
    cut = tensor.unflatten(dim, (chunks, -1))
    at = dim % tensor.dim()
    return torch.cat([cut.select(at, number) for number in numbers(index, size, balanced)], at)


def unshard_sequence(tensor, dim, group=None, balanced=True):
    expect_equal_shards({"the shard": tensor}, group, dim, 1 + balanced)
    size, at = dist.get_world_size(group), dim % tensor.dim()
    shards = [torch.empty_like(tensor.contiguous()) for _ in range(size)]
    dist.all_gather(shards, tensor.detach().contiguous(), group=group)
    parts = {}
    for index, shard in enumerate(shards):
        parts |= dict(zip(numbers(index, size, balanced), shard.chunk(1 + balanced, at), strict=True))
    return torch.cat([parts[number] for number in sorted(parts)], at)


def visible_pairs(index, source, size, causal, balanced):
    return [
        (own, other, causal and q == k)
        for own, q in enumerate(numbers(index, size, balanced))
        for other, k in enumerate(numbers(source, size, balanced))
        if k <= q or not causal
    ]


def merge(output, log_sum, other_output, other_log_sum):
    share = torch.sigmoid(log_sum - other_log_sum)
    return torch.lerp(other_output, output, share), torch.logaddexp(other_log_sum, log_sum)


def travel(tensor, group):
    """Yield this rank's tensor, and then those that come from the left, while the next one is in flight."""
    index, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(size):
        works, following = [], None
        if step < size - 1:
            following = torch.empty_like(tensor)
            works = shift(tensor, following, group)
        yield (index - step) % size, tensor
        for work in works:
            work.wait()
        tensor = following


def shift(outgoing, incoming, group):
    index, size = dist.get_rank(group), dist.get_world_size(group)
    return batch_isend_irecv(
        [
            P2POp(isend, outgoing, group=group, group_peer=(index + 1) % size),
            P2POp(irecv, incoming, group=group, group_peer=(index - 1) % size),
        ]
    )


def fine(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def logits_of(query, key, masked):
    logits = einsum("bhqd,bhkd->bhqk", query, key) * query.shape[-1] ** -0.5
    if masked:
        logits = torch.where(torch.ones_like(logits).tril() > 0, logits, -torch.inf)
    return logits


def by_query(pairs):
    return groupby(sorted(pairs), key=lambda pair: pair[0])


def ring_forward(query, key, value, group, causal, balanced):
    index, size = dist.get_rank(group), dist.get_world_size(group)
    queries, results = fine(query).chunk(1 + balanced, 2), [None] * (1 + balanced)
    for source, block in travel(torch.stack([key, value]), group):
        halves = fine(block).chunk(1 + balanced, 3)
        for own, pairs in by_query(visible_pairs(index, source, size, causal, balanced)):
            pairs = list(pairs)
            logits = torch.cat([logits_of(queries[own], halves[other][0], masked) for _, other, masked in pairs], -1)
            values = torch.cat([halves[other][1] for _, other, _ in pairs], 2)
            part = einsum("bhqk,bhkd->bhqd", logits.softmax(-1), values), logits.logsumexp(-1, True)
            results[own] = part if results[own] is None else merge(*results[own], *part)
    return torch.cat([output for output, _ in results], 2), torch.cat([lse for _, lse in results], 2)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, causal, balanced):
        output, log_sum = ring_forward(q, k, v, group, causal, balanced)
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.group, ctx.causal, ctx.balanced = group, causal, balanced
        return output.to(q.dtype)

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, output, log_sum = ctx.saved_tensors
        group, causal, balanced = ctx.group, ctx.causal, ctx.balanced
        index, size = dist.get_rank(group), dist.get_world_size(group)
        gradient = fine(gradient)
        delta = (output * gradient).sum(-1, keepdim=True)
        dq = torch.zeros_like(gradient)
        parts = [t.chunk(1 + balanced, 2) for t in (fine(q), gradient, log_sum, delta, dq)]
        works, arrived, sent = [], None, None
        for source, block in travel(torch.stack([k, v]), group):
            terms = torch.zeros_like(block, dtype=gradient.dtype)
            cut, halves = fine(block).chunk(1 + balanced, 3), terms.chunk(1 + balanced, 3)
            for own, other, masked in visible_pairs(index, source, size, causal, balanced):
                query, grad, lse, shift_by, into = (t[own] for t in parts)
                p = (logits_of(query, cut[other][0], masked) - lse).exp()
                ds = p * (einsum("bhqd,bhkd->bhqk", grad, cut[other][1]) - shift_by) * query.shape[-1] ** -0.5
                into += einsum("bhqk,bhkd->bhqd", ds, cut[other][0])
                halves[other][0].add_(einsum("bhqk,bhqd->bhkd", ds, query))
                halves[other][1].add_(einsum("bhqk,bhqd->bhkd", p, grad))
            for work in works:
                work.wait()
            if arrived is not None:
                terms += arrived
            if size > 1:
                sent, arrived = terms, torch.empty_like(terms)
                works = shift(sent, arrived, group)
        for work in works:
            work.wait()
        dk, dv = terms if size == 1 else arrived
        return *(t.to(q.dtype) for t in (dq, dk, dv)), None, None, None


def ring_attention(q, k, v, group=None, causal=True, balanced=True):
    expect_attention_shards(q, k, v, group, 1 + balanced, causal=causal, balanced=balanced)
    return Ring.apply(q, k, v, group, causal, balanced)


def all_to_all_attention(q, k, v, group=None, causal=True):
    expect_attention_shards(q, k, v, group, heads_divide=True, causal=causal)
    size, members = dist.get_world_size(group), group or dist.group.WORLD

    def exchange(tensor):
        """Send part i of the first dimension, which has one part per rank, to rank i. torch's version is recorded."""
        return all_to_all_single_autograd(tensor.contiguous(), None, None, members).view(tensor.shape)

    def whole(tensor):
        parts = exchange(tensor.unflatten(1, (size, -1)).movedim(1, 0))  # [N, B, H/N, T, D]
        return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)

    mixed = functional.scaled_dot_product_attention(whole(q), whole(k), whole(v), is_causal=causal)
    parts = exchange(mixed.unflatten(2, (size, -1)).movedim(2, 0))  # [N, B, H/N, T, D]
    return parts.permute(1, 0, 2, 3, 4).flatten(1, 2)


class ContextParallelGPT(nn.Module):
    """Adds up the gradient of each parameter as soon as it is complete."""

    def __init__(self, gpt, group=None, balanced=True):
        super().__init__()
        self.gpt, self.group, self.balanced, self.works = gpt, group, balanced, []
        for parameter in gpt.parameters():
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter):
        self.works.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def finish_gradient_sync(self):
        while self.works:
            self.works.pop().wait()

    def own(self, tensor, dim):
        return shard_sequence(tensor, dim, self.group, self.balanced)

    def forward(self, tokens, targets):
        logits = self.gpt(
            self.own(tokens, 1),
            positions=self.own(torch.arange(tokens.shape[1], device=tokens.device), 0),
            attend=lambda q, k, v: ring_attention(q, k, v, group=self.group, balanced=self.balanced),
        )
        weights = (targets != -100).to(logits.dtype)
        weights = self.own(weights / weights.sum(), 1)
        log_probabilities = logits.log_softmax(-1)
        picked = log_probabilities.gather(-1, self.own(targets, 1).clamp(min=0)[..., None])[..., 0]
        own_term = -(picked * weights).sum()
        total = own_term.detach().clone()
        dist.all_reduce(total, group=self.group)
        return own_term + (total - own_term).detach()
