"""Tensor hooks and plain functions instead of autograd functions, lab 01's ring, and a loss with its own backward."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.models import TinyGPT
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from solutions.grouped_attention import sharing_group
from solutions.tensor_parallel import ParallelGPT


def ringed(tensor, group):
    total = tensor.detach().contiguous().clone().view(-1)
    ring_all_reduce(total, group)
    return total.view(tensor.shape)


class Pair(torch.autograd.Function):
    """Two functions of a tensor: one for forward and one for backward."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def sum_over_ranks(partial, group=None):
    return partial + (ringed(partial, group) - partial).detach()  # adds a constant, so the gradient is unchanged


def copy_to_ranks(x, group=None):
    copied = x * 1
    if copied.requires_grad:
        copied.register_hook(lambda gradient: ringed(gradient, group))
    return copied


def gathered(shard, group, dim=1):
    front = shard.detach().movedim(dim, 0).contiguous()
    whole = ring_all_gather(front, group).view(-1, *front.shape[1:])
    return whole.movedim(0, dim).contiguous()


def scattered(partial, group, dim=1):
    if partial.shape[dim] % dist.get_world_size(group):
        raise ValueError(f"{dist.get_world_size(group)} ranks cannot share {partial.shape[dim]} tokens")
    front = partial.detach().movedim(dim, 0).contiguous()
    own = ring_reduce_scatter(front, group)
    return own.view(-1, *front.shape[1:]).movedim(0, dim).contiguous()


def scatter_tokens(partial, group=None):
    return Pair.apply(partial, lambda x: scattered(x, group), lambda gradient: gathered(gradient, group))


def gather_tokens(shard, group=None):
    return Pair.apply(shard, lambda x: gathered(x, group), lambda gradient: scattered(gradient, group))


def part(tensor, group, dim=0):
    size = dist.get_world_size(group)
    if tensor.shape[dim] % size:
        raise ValueError(f"a dimension of {tensor.shape[dim]} is not a multiple of {size} ranks")
    each = tensor.shape[dim] // size
    return nn.Parameter(tensor.detach().narrow(dim, each * dist.get_rank(group), each).clone().contiguous())


def part_or_none(tensor, group):
    return None if tensor is None else part(tensor, group)


class ColumnParallelLinear(nn.Linear):
    sharded = ("weight", "bias")

    @classmethod
    def of(cls, weight, bias, group, gather_output=False, enter=copy_to_ranks):
        layer = cls(1, 1, bias=False)
        layer.weight, layer.bias = weight, bias
        layer.group, layer.gather_output, layer.enter = group, gather_output, enter
        return layer

    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=copy_to_ranks):
        return cls.of(part(linear.weight, group), part_or_none(linear.bias, group), group, gather_output, enter)

    def forward(self, x):
        outputs = super().forward(self.enter(x, self.group))
        if not self.gather_output:
            return outputs
        rank, width = dist.get_rank(self.group), outputs.shape[-1]
        return Pair.apply(
            outputs,
            lambda shard: gathered(shard, self.group, -1),
            lambda gradient: gradient[..., rank * width : (rank + 1) * width],
        )


class RowParallelLinear(nn.Module):
    sharded = ("weight",)

    def __init__(self, weight, bias, group, leave):
        super().__init__()
        self.weight, self.group, self.leave = weight, group, leave
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear, group=None, leave=sum_over_ranks):
        return cls(part(linear.weight, group, 1), linear.bias, group, leave)

    def forward(self, x):
        outputs = self.leave(torch.einsum("...i,oi->...o", x, self.weight), self.group)
        return outputs if self.bias is None else outputs + self.bias


class ParallelAttention(nn.Module):
    @classmethod
    def from_attention(cls, attention, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        own, whole = cls(), attention.query_key_value
        parts = [part(each, group) for each in head_parts(whole.weight, attention.heads)]
        weight = nn.Parameter(torch.cat([each.detach().flatten(0, 1) for each in parts]))
        bias = None
        if whole.bias is not None:
            parts = [part(each, group) for each in head_parts(whole.bias, attention.heads)]
            bias = nn.Parameter(torch.cat([each.detach().flatten() for each in parts]))
        own.head_width = attention.project.in_features // attention.heads
        own.query_key_value = ColumnParallelLinear.of(weight, bias, group, enter=enter)
        own.project = RowParallelLinear.from_linear(attention.project, group, leave)
        return own

    def forward(self, x):
        query, key, value = (
            each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in self.query_key_value(x).chunk(3, -1)
        )
        scores = query @ key.transpose(-2, -1) / self.head_width**0.5
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        return self.project(mixed.transpose(1, 2).flatten(-2))


def head_parts(tensor, heads):
    """Split queries, keys and values, each by head: three tensors (heads, rows of a head, ...)."""
    return [each.unflatten(0, (heads, -1)) for each in tensor.chunk(3)]


class ParallelGatedMLP(nn.Module):
    @classmethod
    def from_mlp(cls, mlp, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        own, inner = cls(), mlp.down.in_features
        halves = mlp.gate_up.weight.detach().split(inner)
        weight = nn.Parameter(torch.stack([part(half, group).detach() for half in halves]).flatten(0, 1))
        own.gate_up = ColumnParallelLinear.of(weight, None, group, enter=enter)
        own.down = RowParallelLinear.from_linear(mlp.down, group, leave)
        return own

    def forward(self, x):
        gate, up = self.gate_up(x).tensor_split(2, -1)
        return self.down(gate * torch.sigmoid(gate) * up)


class ParallelGroupedAttention(nn.Module):
    @classmethod
    def from_attention(cls, attention, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        own, size, kv_heads = cls(), dist.get_world_size(group), attention.kv_heads
        copies = -(-size // kv_heads)
        keys_and_values = [
            torch.cat([head for head in half.chunk(kv_heads) for _ in range(copies)])
            for half in attention.key_value.weight.detach().chunk(2)
        ]
        if copies * kv_heads % size or attention.heads % size:
            raise ValueError(f"{size} ranks, {kv_heads} kv heads, and {attention.heads} heads of queries do not fit")
        own.key_value = nn.Parameter(torch.cat([part(half, group).detach() for half in keys_and_values]))
        own.query = part(attention.query.weight, group)
        own.project = RowParallelLinear.from_linear(attention.project, group, leave)
        own.head_width = attention.project.in_features // attention.heads
        own.group, own.enter = group, enter
        sharing = sharing_group(kv_heads, group)
        own.key_value.register_hook(lambda gradient: ringed(gradient, sharing))
        return own

    def forward(self, x):
        x = self.enter(x, self.group)
        query = (x @ self.query.mT).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        key, value = (
            (x @ half.mT).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for half in self.key_value.chunk(2)
        )
        grouped = query.unflatten(1, (key.shape[1], -1))  # (B, kv heads, queries of each, T, D/H)
        scores = grouped @ key.unsqueeze(2).mT / self.head_width**0.5
        future = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1)
        mixed = (scores.masked_fill(future, -torch.inf).softmax(-1) @ value.unsqueeze(2)).flatten(1, 2)
        return self.project(mixed.transpose(1, 2).flatten(-2))


def padded(rows, group):
    size = dist.get_world_size(group)
    whole = rows.new_zeros(-(-len(rows) // size) * size, *rows.shape[1:])
    whole[: len(rows)] = rows.detach()
    return whole


class VocabParallelEmbedding(nn.Module):
    sharded = ("weight",)

    @classmethod
    def from_embedding(cls, embedding, group=None, leave=sum_over_ranks):
        own = cls()
        own.weight, own.group, own.leave = part(padded(embedding.weight, group), group), group, leave
        own.padding_idx = embedding.padding_idx
        return own

    def forward(self, tokens):
        first = dist.get_rank(self.group) * len(self.weight)
        found = self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        here = (tokens >= first) & (tokens < first + len(self.weight))
        rows = self.weight[tokens[here] - first]
        if self.padding_idx is not None:
            rows = torch.where((tokens[here] == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return self.leave(found.index_put((here,), rows), self.group)


class Loss(torch.autograd.Function):
    """The gradient of the loss is softmax − one-hot, divided by the number of targets."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        highest = logits.amax(-1, keepdim=True)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - highest).exp_()
        first, columns = dist.get_rank(group) * logits.shape[-1], logits.shape[-1]
        one_hot = torch.zeros_like(logits)
        here = (targets >= first) & (targets < first + columns)
        one_hot[here] = F.one_hot(targets[here] - first, columns).to(logits.dtype)
        chosen = torch.where(one_hot.bool(), logits - highest, 0.0).sum(-1)
        numbers = ringed(torch.stack([exponentials.sum(-1), chosen]), group)
        ctx.save_for_backward((exponentials / numbers[0].unsqueeze(-1) - one_hot) / targets.numel())
        return (numbers[0].log() - numbers[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None


def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
    precise = torch.float64 if logits_shard.dtype == torch.float64 else torch.float32
    return Loss.apply(logits_shard.to(precise), targets, group)


def parallelize(model: TinyGPT, group=None, sequence_parallel=False):
    enter, leave = (gather_tokens, scatter_tokens) if sequence_parallel else (copy_to_ranks, sum_over_ranks)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    is_tied = model.output.weight is model.token_embedding.weight
    weight, bias = model.output.weight, model.output.bias
    weight = part(padded(weight, group), group)
    bias = None if bias is None else part(padded(bias, group), group)
    for block in model.blocks:
        block.attention = ParallelAttention.from_attention(block.attention, group, enter, leave)
        block.up = ColumnParallelLinear.from_linear(block.up, group, False, enter)
        block.down = RowParallelLinear.from_linear(block.down, group, leave)
    model.token_embedding = VocabParallelEmbedding.from_embedding(model.token_embedding, group, leave)
    model.output = ColumnParallelLinear.of(weight, bias, group, enter=enter)
    if is_tied:
        model.output.weight = model.token_embedding.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.group, model.sequence_parallel, model.__class__ = group, sequence_parallel, ParallelGPT
    return model
