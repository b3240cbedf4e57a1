"""Carries a maximum, a sum and a value along, sends keys and values separately, and joins what a query chunk sees.

The gradients travel with their keys, and torch's autograd differentiates each block.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from shared.sharded.sequences import expect_attention_shards, expect_divisible, expect_equal_shards
from solutions.async_collectives import InFlight
from solutions.tensor_operators import SumOverRanks


def shard_sequence(tensor, dim, group=None, balanced=True):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    expect_divisible(tensor.shape[dim], 2 * size if balanced else size, "the sequence")
    length = tensor.shape[dim] // (2 * size if balanced else size)
    first = tensor.narrow(dim, rank * length, length)
    if not balanced:
        return first.clone()
    return torch.cat((first, tensor.narrow(dim, (2 * size - 1 - rank) * length, length)), dim)


def unshard_sequence(tensor, dim, group=None, balanced=True):
    expect_equal_shards({"the shard": tensor}, group, dim, 2 if balanced else 1)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    with torch.no_grad():
        mine = tensor.movedim(dim, 0).contiguous()
        shards = [mine if other == rank else torch.empty_like(mine) for other in range(size)]
        others = [other for other in range(size) if other != rank]
        InFlight([(mine, other) for other in others], [(shards[other], other) for other in others], group).wait()
        if not balanced:
            return torch.cat(shards).movedim(0, dim)
        halves = [shard.chunk(2) for shard in shards]
        early, late = [half[0] for half in halves], [half[1] for half in halves][::-1]
        return torch.cat(early + late).movedim(0, dim)


def visible_pairs(index, source, size, causal, balanced):
    if not causal:
        chunks = range(2 if balanced else 1)
        return [(i, j, False) for i in chunks for j in chunks]
    if not balanced:
        return [] if source > index else [(0, 0, source == index)]
    if source == index:
        return [(0, 0, True), (1, 0, False), (1, 1, True)]
    return [(1, 0, False), (0, 0, False) if source < index else (1, 1, False)]


def merge(output, log_sum, other_output, other_log_sum):
    largest = torch.maximum(log_sum, other_log_sum)
    first, second = torch.exp(log_sum - largest), torch.exp(other_log_sum - largest)
    total = first + second
    return (output * first + other_output * second) / total, largest + total.log()


class Running:
    """What the queries of one chunk have seen so far."""

    def __init__(self, query):
        self.query = query
        self.maximum = torch.full_like(query[..., :1], -torch.inf)
        self.total = torch.zeros_like(self.maximum)
        self.value = torch.zeros_like(query)

    def see(self, key, value, masked):
        scores = scored(self.query, key, masked)
        maximum = torch.maximum(self.maximum, scores.max(-1, keepdim=True).values)
        weights, shrink = (scores - maximum).exp(), (self.maximum - maximum).exp()
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.value = self.value * shrink + weights @ value
        self.maximum = maximum


def scored(query, key, masked):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores + torch.full_like(scores, -torch.inf).triu(1) if masked else scores


def precise(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Ring:
    """Tensors that move to the right together."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.right, self.left = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def launch(self, *tensors):
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        sends, receives = ([(t, peer) for t in each] for each, peer in ((tensors, self.right), (arriving, self.left)))
        return InFlight(sends, receives, self.group), arriving, tensors


def ring_forward(query, key, value, group, causal, balanced):
    ring, parts = Ring(group), 2 if balanced else 1
    chunks = [Running(chunk) for chunk in precise(query).chunk(parts, 2)]
    held = [key.contiguous(), value.contiguous()]
    for step in range(ring.size):
        launched = ring.launch(*held) if step < ring.size - 1 else None
        keys, values = (precise(each).chunk(parts, 2) for each in held)
        for i, j, masked in visible_pairs(ring.rank, (ring.rank - step) % ring.size, ring.size, causal, balanced):
            chunks[i].see(keys[j], values[j], masked)
        if launched:
            launched[0].wait()
            held = launched[1]
    outputs = [chunk.value / chunk.total for chunk in chunks]
    return torch.cat(outputs, 2), torch.cat([chunk.maximum + chunk.total.log() for chunk in chunks], 2)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, causal, balanced):
        output, log_sum = ring_forward(q, k, v, group, causal, balanced)
        ctx.save_for_backward(q, k, v, log_sum, output)
        ctx.call = group, causal, balanced
        return output.to(q.dtype)

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, log_sum, output = ctx.saved_tensors
        group, causal, balanced = ctx.call
        ring, parts = Ring(group), 2 if balanced else 1
        gradient = precise(gradient)
        shift = (gradient * output).sum(-1, keepdim=True)
        own = precise(q)
        chunks = list(zip(*(t.chunk(parts, 2) for t in (own, gradient, log_sum, shift)), strict=True))
        of_query = [torch.zeros_like(chunk[0]) for chunk in chunks]
        held, gradients = [k.contiguous(), v.contiguous()], None
        for step in range(ring.size):
            launched = ring.launch(*held) if step < ring.size - 1 else None
            keys, values = (precise(each) for each in held)
            terms = [torch.zeros_like(keys), torch.zeros_like(values)]
            source = (ring.rank - step) % ring.size
            for i, j, masked in visible_pairs(ring.rank, source, ring.size, causal, balanced):
                found = block_gradients(*chunks[i], keys.chunk(parts, 2)[j], values.chunk(parts, 2)[j], masked)
                of_query[i] += found[0]
                for term, each in zip(terms, found[1:], strict=True):
                    term.chunk(parts, 2)[j].add_(each)
            if gradients:
                gradients[0].wait()
                terms = [term + each for term, each in zip(terms, gradients[1], strict=True)]
            if ring.size > 1:
                gradients = ring.launch(*terms)
            if launched:
                launched[0].wait()
                held = launched[1]
        if gradients:
            gradients[0].wait()
            terms = gradients[1]
        found = (torch.cat(of_query, 2), *terms)
        return *(each.to(q.dtype) for each in found), None, None, None


def block_gradients(query, gradient, log_sum, shift, key, value, masked):
    """Differentiate Σ p · (gradient · value − shift), whose p is the share of this block in the whole softmax."""
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in (query, key, value)]
        shares = (scored(*inputs[:2], masked) - log_sum).exp()
        target = (shares * (gradient @ inputs[2].mT - shift)).sum()
        return torch.autograd.grad(target, inputs)


def ring_attention(q, k, v, group=None, causal=True, balanced=True):
    expect_attention_shards(q, k, v, group, 2 if balanced else 1, causal=causal, balanced=balanced)
    return Attention.apply(q, k, v, group, causal, balanced)


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return to_heads(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return to_tokens(gradient, ctx.group), None


class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return to_tokens(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return to_heads(gradient, ctx.group), None


def exchanged(parts, group):
    received = [torch.empty_like(part) for part in parts]
    rank = dist.get_rank(group)
    others = [peer for peer in range(len(parts)) if peer != rank]
    InFlight([(parts[peer], peer) for peer in others], [(received[peer], peer) for peer in others], group).wait()
    received[rank] = parts[rank]
    return received


def to_heads(tensor, group):
    parts = [part.contiguous() for part in tensor.chunk(dist.get_world_size(group), 1)]
    return torch.cat(exchanged(parts, group), 2)


def to_tokens(tensor, group):
    parts = [part.contiguous() for part in tensor.chunk(dist.get_world_size(group), 2)]
    return torch.cat(exchanged(parts, group), 1)


def all_to_all_attention(q, k, v, group=None, causal=True):
    expect_attention_shards(q, k, v, group, heads_divide=True, causal=causal)
    mixed = scaled_dot_product_attention(*(ToHeads.apply(each, group) for each in (q, k, v)), is_causal=causal)
    return ToTokens.apply(mixed, group)


class ContextParallelGPT(nn.Module):
    def __init__(self, gpt, group=None, balanced=True):
        super().__init__()
        self.gpt, self.group, self.balanced = gpt, group, balanced

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        stacked = torch.stack([tokens, targets, positions])
        tokens, own_targets, positions = shard_sequence(stacked, 2, self.group, self.balanced)
        logits = self.gpt(
            tokens,
            positions=positions[0],
            attend=lambda q, k, v: ring_attention(q, k, v, self.group, balanced=self.balanced),
        )
        counts = own_targets != -100
        losses = cross_entropy(logits[counts], own_targets[counts], reduction="sum")
        return SumOverRanks.apply(losses, self.group) / (targets != -100).sum()

    def finish_gradient_sync(self):
        flat = torch.nn.utils.parameters_to_vector([p.grad for p in self.parameters()])
        dist.all_reduce(flat, group=self.group)
        start = 0
        for parameter in self.parameters():
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
