"""Writes autograd functions with setup_context, splits by index_select, and multiplies instead of masking."""

import torch
import torch.distributed as dist
from torch import nn

from shared.sharded.layers import expect_in_vocabulary, expect_plain, expect_plain_embedding, like
from solutions import grouped_attention, vocabulary
from solutions import tensor_parallel as right
from solutions.tensor_operators import all_gather, check_divisible, concatenate_shards, reduce_scatter


def _summed(tensor, group):
    total = tensor.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=group, async_op=True)
    work.wait()
    return total


def _operator(forwards, backwards):
    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(x, group):
            return forwards(x, group)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.group = inputs[1]

        @staticmethod
        def backward(ctx, gradient):
            return backwards(gradient, ctx.group), None

    return Operator


def _same(x, group):
    return x.view_as(x)


_Sum, _Copy = _operator(_summed, lambda gradient, _: gradient), _operator(_same, _summed)
_Gather = _operator(lambda x, group: all_gather(x, -2, group), lambda g, group: reduce_scatter(g, -2, group))
_Scatter = _operator(lambda x, group: reduce_scatter(x, -2, group), lambda g, group: all_gather(g, -2, group))


def sum_over_ranks(partial, group=None):
    return _Sum.apply(partial, group)


def copy_to_ranks(x, group=None):
    return _Copy.apply(x, group)


def scatter_tokens(partial, group=None):
    check_divisible(partial, group)
    return _Scatter.apply(partial, group)


def gather_tokens(shard, group=None):
    return _Gather.apply(shard, group)


def _own(tensor, dim, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    length, rest = divmod(tensor.shape[dim], size)
    if rest:
        raise ValueError(f"{tensor.shape[dim]} is not divisible by {size} ranks")
    indices = torch.arange(rank * length, (rank + 1) * length, device=tensor.device)
    return like(tensor, tensor.detach().index_select(dim, indices))


class ColumnParallelLinear(right.ColumnParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, *, enter=copy_to_ranks):
        expect_plain(linear, nn.Linear, group)
        bias = _own(linear.bias, 0, group) if linear.bias is not None else None
        return cls(_own(linear.weight, 0, group), bias, group, gather_output=gather_output, enter=enter)

    def forward(self, x):
        x = self.enter(x, self.group)
        y = torch.matmul(x, self.weight.t())
        y = y + self.bias if self.bias is not None else y
        if not self.gather_output:
            return y
        return concatenate_shards(y, self.group)


class RowParallelLinear(right.RowParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, leave=sum_over_ranks):
        expect_plain(linear, nn.Linear, group)
        bias = None if linear.bias is None else like(linear.bias, linear.bias.detach() + 0)
        return cls(_own(linear.weight, 1, group), bias, group, leave)

    def forward(self, x):
        product = self.leave(x @ self.weight.mT, self.group)
        return product.add(self.bias) if self.bias is not None else product


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        whole, heads = attention.query_key_value, attention.heads
        numbers = torch.arange(len(whole.weight)).view(3, heads, -1)
        rows = _own(numbers, 1, group).flatten().to(whole.weight.device)
        parts = [None if each is None else like(each, each.detach()[rows]) for each in (whole.weight, whole.bias)]
        project = RowParallelLinear.from_linear(attention.project, group, leave)
        return cls(ColumnParallelLinear(*parts, group, enter=enter), project, heads // dist.get_world_size(group))


class ParallelGatedMLP(right.ParallelGatedMLP):
    @classmethod
    def from_mlp(cls, mlp, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        whole = mlp.gate_up.weight.detach()
        own = _own(torch.arange(len(whole) // 2, device=whole.device), 0, group)
        gate_up = ColumnParallelLinear(whole[torch.cat([own, own + len(whole) // 2])], None, group, enter=enter)
        return cls(gate_up, RowParallelLinear.from_linear(mlp.down, group, leave))


class ParallelGroupedAttention(grouped_attention.ParallelGroupedAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        size, rank, kv_heads = dist.get_world_size(group), dist.get_rank(group), attention.kv_heads
        if attention.heads % size:
            raise ValueError(f"{size} ranks cannot share {attention.heads} heads of queries evenly")
        if size % kv_heads and kv_heads % size:
            raise ValueError(f"{size} ranks cannot share {kv_heads} heads of keys and values evenly")
        whole = attention.key_value.weight.detach()
        rows = torch.arange(len(whole), device=whole.device).view(2, kv_heads, -1)
        own = range(rank * kv_heads // size, max((rank + 1) * kv_heads // size, rank * kv_heads // size + 1))
        key_value = whole.index_select(0, rows[:, list(own)].flatten())
        project = RowParallelLinear.from_linear(attention.project, group, leave)
        return cls(_own(attention.query.weight, 0, group), key_value, project, attention, group, enter)

    def shared_key_value(self):
        return _Copy.apply(self.key_value, self.sharing)


class VocabParallelEmbedding(vocabulary.VocabParallelEmbedding):
    @classmethod
    def from_embedding(cls, embedding, group=None, leave=sum_over_ranks):
        expect_plain_embedding(embedding, group)
        own = cls(vocabulary.vocabulary_shard(embedding.weight, group), group, leave)
        own.vocabulary = embedding.num_embeddings
        own.padding_idx = vocabulary.own_padding_idx(embedding, len(own.weight), group)
        return own

    def forward(self, tokens):
        expect_in_vocabulary(tokens, self.vocabulary)
        rows = len(self.weight)
        owner, index = tokens // rows, tokens % rows
        found = torch.nn.functional.embedding(index, self.weight, self.padding_idx)
        zero = torch.zeros((), dtype=found.dtype, device=found.device)
        return self.leave(torch.where((owner == dist.get_rank(self.group))[..., None], found, zero), self.group)


def vocab_parallel_cross_entropy(logits_shard, targets, group=None, *, ignore_index=vocabulary.IGNORED):
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    columns, rank = logits.shape[-1], dist.get_rank(group)
    expect_in_vocabulary(targets, columns * dist.get_world_size(group), ignore_index)
    highest = logits.detach().max(dim=-1).values
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    lower = logits - highest[..., None]
    owner = torch.div(targets, columns, rounding_mode="floor")
    picked = torch.take_along_dim(lower, targets.remainder(columns)[..., None], dim=-1)[..., 0]
    picked = torch.where(owner == rank, picked, torch.zeros_like(picked))
    sums = sum_over_ranks(torch.stack([torch.logsumexp(lower, -1).exp(), picked]), group)
    return vocabulary.mean_without(sums[0].log() - sums[1], targets == ignore_index)


class _Parallel(right.ParallelGPT):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        own = right.sharded_names(self)
        gradients = [(name in own, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        split, whole = (
            sum(
                (gradient.double().norm().square() for is_own, gradient in gradients if is_own == which),
                torch.zeros((), dtype=torch.float64, device=self.norm.weight.device),
            )
            for which in (True, False)
        )
        dist.all_reduce(split, group=self.group)
        norm = (split + whole).sqrt()
        torch._foreach_mul_([gradient for _, gradient in gradients], min(1.0, max_norm / (norm.item() + 1e-6)))
        return norm


def parallelize(model, group=None, sequence_parallel=False):
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    enter, leave = (copy_to_ranks, sum_over_ranks) if not sequence_parallel else (gather_tokens, scatter_tokens)
    is_tied = model.output.weight is model.token_embedding.weight
    rows = [
        None if each is None else vocabulary.vocabulary_shard(each, group)
        for each in (model.output.weight, model.output.bias)
    ]
    for block in model.blocks:
        for name, split in (
            ("attention", lambda layer: ParallelAttention.from_attention(layer, group, enter, leave)),
            ("up", lambda layer: ColumnParallelLinear.from_linear(layer, group, enter=enter)),
            ("down", lambda layer: RowParallelLinear.from_linear(layer, group, leave)),
        ):
            setattr(block, name, split(getattr(block, name)))
    model.output = ColumnParallelLinear(*rows, group, enter=enter)
    model.token_embedding = VocabParallelEmbedding.from_embedding(model.token_embedding, group, leave)
    if is_tied:
        model.token_embedding.weight = model.output.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    model.__class__, model.group, model.sequence_parallel = _Parallel, group, sequence_parallel
    return model
