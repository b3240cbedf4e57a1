"""Written with DTensor: each collective is a change of placement, from Partial, Replicate or Shard to another one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from shared.models import TinyGPT
from solutions.grouped_attention import sharing_group

ROWS, COLUMNS, TOKENS = Shard(0), Shard(1), Shard(-2)


def mesh_of(group, tensor):
    return DeviceMesh.from_group(group or dist.group.WORLD, tensor.device.type)


def moved(tensor, group, before, after):
    """Interpret a local tensor as placed `before`, place it `after`, and return the local tensor again."""
    before, after = (Shard(each.dim % tensor.dim()) if isinstance(each, Shard) else each for each in (before, after))
    placed = DTensor.from_local(tensor, mesh_of(group, tensor), [before], run_check=False)
    local = placed.redistribute(placements=[after]).to_local()
    return local.view_as(local) if before == after else wait_tensor(local)


class Move(torch.autograd.Function):
    """Changes the placement in forward and that of the gradient in backward, each (before, after)."""

    @staticmethod
    def forward(ctx, tensor, group, there, back):
        ctx.group, ctx.back = group, back
        return moved(tensor, group, *there)

    @staticmethod
    def backward(ctx, gradient):
        return moved(gradient, ctx.group, *ctx.back), None, None, None


def sum_over_ranks(partial, group=None):
    return Move.apply(partial, group, (Partial(), Replicate()), (Replicate(), Replicate()))


def copy_to_ranks(x, group=None):
    return Move.apply(x, group, (Replicate(), Replicate()), (Partial(), Replicate()))


def scatter_tokens(partial, group=None):
    size = dist.get_world_size(group)
    if partial.shape[-2] % size:
        raise ValueError(f"{partial.shape[-2]} tokens cannot be divided by {size} ranks")
    return Move.apply(partial, group, (Partial(), TOKENS), (TOKENS, Replicate()))


def gather_tokens(shard, group=None):
    return Move.apply(shard, group, (TOKENS, Replicate()), (Partial(), TOKENS))


def concatenated(shard, group):
    return Move.apply(shard, group, (Shard(-1), Replicate()), (Replicate(), Shard(-1)))


def own(tensor, group, placement):
    """Return this rank's part of a tensor that is the same on every rank, as a parameter."""
    size, length = dist.get_world_size(group), tensor.shape[placement.dim]
    if length % size:
        raise ValueError(f"{length} cannot be divided by {size} ranks")
    placed = distribute_tensor(tensor.detach(), mesh_of(group, tensor), [placement], src_data_rank=None)
    return nn.Parameter(placed.to_local().clone(memory_format=torch.contiguous_format))


class ColumnParallelLinear(nn.Module):
    def __init__(self, weight, bias, group, gather_output, enter):
        super().__init__()
        self.weight, self.bias, self.group, self.gather_output, self.enter = weight, bias, group, gather_output, enter

    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=copy_to_ranks):
        bias = None if linear.bias is None else own(linear.bias, group, ROWS)
        return cls(own(linear.weight, group, ROWS), bias, group, gather_output, enter)

    def forward(self, x):
        outputs = F.linear(self.enter(x, self.group), self.weight, self.bias)
        return concatenated(outputs, self.group) if self.gather_output else outputs


class RowParallelLinear(nn.Module):
    def __init__(self, weight, bias, group, leave):
        super().__init__()
        self.weight, self.bias, self.group, self.leave = weight, bias, group, leave

    @classmethod
    def from_linear(cls, linear, group=None, leave=sum_over_ranks):
        return cls(own(linear.weight, group, COLUMNS), linear.bias, group, leave)

    def forward(self, x):
        outputs = self.leave(x @ self.weight.T, self.group)
        return outputs + self.bias if self.bias is not None else outputs


class ParallelAttention(nn.Module):
    def __init__(self, query_key_value, project, head_width):
        super().__init__()
        self.query_key_value, self.project, self.head_width = query_key_value, project, head_width

    @classmethod
    def from_attention(cls, attention, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        size, whole, heads = dist.get_world_size(group), attention.query_key_value, attention.heads
        if heads % size:
            raise ValueError(f"{heads} heads cannot be divided by {size} ranks")

        def permuted(tensor):  # (3, N, rows, ...) → (N, 3, rows, ...), so that a contiguous shard has whole heads
            return tensor.unflatten(0, (3, size, -1)).transpose(0, 1).flatten(0, 2)

        bias = None if whole.bias is None else own(permuted(whole.bias), group, ROWS)
        column = ColumnParallelLinear(own(permuted(whole.weight), group, ROWS), bias, group, False, enter)
        row = RowParallelLinear.from_linear(attention.project, group, leave)
        return cls(column, row, attention.project.in_features // heads)

    def forward(self, x):
        parts = self.query_key_value(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class ParallelGatedMLP(nn.Module):
    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    @classmethod
    def from_mlp(cls, mlp, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        halves = [own(half, group, ROWS).detach() for half in mlp.gate_up.weight.chunk(2)]
        gate_up = ColumnParallelLinear(nn.Parameter(torch.cat(halves)), None, group, False, enter)
        return cls(gate_up, RowParallelLinear.from_linear(mlp.down, group, leave))

    def forward(self, x):
        inner = self.gate_up(x).unflatten(-1, (2, -1))
        return self.down(F.silu(inner[..., 0, :]) * inner[..., 1, :])


class ParallelGroupedAttention(nn.Module):
    @classmethod
    def from_attention(cls, attention, group=None, enter=copy_to_ranks, leave=sum_over_ranks):
        split, size, kv_heads = cls(), dist.get_world_size(group), attention.kv_heads
        if attention.heads % size or (size % kv_heads and kv_heads % size):
            raise ValueError(f"{size} ranks cannot divide {attention.heads} heads and {kv_heads} kv heads")
        heads = attention.key_value.weight.detach().unflatten(0, (2, kv_heads, -1)).transpose(0, 1)
        own_heads = heads[dist.get_rank(group) * kv_heads // size :][: max(1, kv_heads // size)]
        split.key_value = nn.Parameter(own_heads.transpose(0, 1).flatten(0, 2).clone())
        split.query = own(attention.query.weight, group, ROWS)
        split.project = RowParallelLinear.from_linear(attention.project, group, leave)
        split.head_width = attention.project.in_features // attention.heads
        split.group, split.enter, split.sharing = group, enter, sharing_group(kv_heads, group)
        return split

    def forward(self, x):
        x = self.enter(x, self.group)
        weight = copy_to_ranks(self.key_value, self.sharing)
        query, key, value = (
            (x @ rows.T).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for rows in (self.query, *weight.chunk(2))
        )
        copies = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


def padded(rows, group):
    missing = -len(rows) % dist.get_world_size(group)
    return F.pad(rows.detach(), (0, 0) * (rows.dim() - 1) + (0, missing))


class VocabParallelEmbedding(nn.Module):
    def __init__(self, weight, group, leave, padding_idx=None):
        super().__init__()
        self.weight, self.group, self.leave = weight, group, leave
        rank, row = divmod(-1 if padding_idx is None else padding_idx, len(weight))
        self.padding_idx = row if rank == dist.get_rank(group) else None

    @classmethod
    def from_embedding(cls, embedding, group=None, leave=sum_over_ranks):
        return cls(own(padded(embedding.weight, group), group, ROWS), group, leave, embedding.padding_idx)

    def forward(self, tokens):
        local = tokens - dist.get_rank(self.group) * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        return self.leave(F.embedding(local * here, self.weight, self.padding_idx) * here.unsqueeze(-1), self.group)


def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
    logits = logits_shard.double() if logits_shard.dtype == torch.float64 else logits_shard.float()
    with torch.no_grad():
        highest = moved(logits.max(-1).values, group, Partial("max"), Replicate())
    logits = logits - highest.unsqueeze(-1)
    local = targets - dist.get_rank(group) * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    chosen = torch.take_along_dim(logits, (local * here).unsqueeze(-1), -1).squeeze(-1)
    chosen = torch.where(here, chosen, 0.0)
    return (sum_over_ranks(logits.exp().sum(-1), group).log() - sum_over_ranks(chosen, group)).mean()


class SplitGPT(TinyGPT):
    def forward(self, tokens, targets=None, summed=False):
        if self.by_tokens and not summed:
            names, values = zip(*self.replicated().items(), strict=True)
            flat = copy_to_ranks(torch.cat([value.reshape(-1) for value in values]), self.group)
            pieces = flat.split([value.numel() for value in values])
            views = {name: piece.view(value.shape) for name, piece, value in zip(names, pieces, values, strict=True)}
            return functional_call(self, views, (tokens, targets, True))
        count = tokens.shape[1]
        positions = self.position_embedding(torch.arange(count, device=tokens.device))
        if self.by_tokens:
            positions = positions.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        x = self.token_embedding(tokens) + positions
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        if targets is None:
            return concatenated(logits, self.group)[..., : self.config.vocab_size]
        first = dist.get_rank(self.group) * logits.shape[-1]
        is_padding = torch.arange(first, first + logits.shape[-1], device=tokens.device) >= self.config.vocab_size
        return vocab_parallel_cross_entropy(logits.masked_fill(is_padding, -torch.inf), targets, self.group)

    def replicated(self):
        split = [layer for layer in self.modules() if isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding)]
        shards = {id(parameter) for layer in split for parameter in layer.parameters()}
        shards |= {id(layer.weight) for layer in self.modules() if isinstance(layer, RowParallelLinear)}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in shards}

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        replicated = self.replicated()
        trained = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        own = [gradient.double().norm() ** 2 for name, gradient in trained.items() if name not in replicated]
        whole = [gradient.double().norm() ** 2 for name, gradient in trained.items() if name in replicated]
        norm = (sum_over_ranks(sum(own), self.group) + sum(whole)) ** 0.5
        if norm > max_norm:
            for gradient in trained.values():
                gradient.mul_(max_norm / norm)
        return norm


def parallelize(model, group=None, sequence_parallel=False):
    operators = (gather_tokens, scatter_tokens) if sequence_parallel else (copy_to_ranks, sum_over_ranks)
    enter, leave = operators
    for block in model.blocks:
        block.attention = ParallelAttention.from_attention(block.attention, group, enter, leave)
        block.up = ColumnParallelLinear.from_linear(block.up, group, False, enter)
        block.down = RowParallelLinear.from_linear(block.down, group, leave)
    tied, output = model.output.weight is model.token_embedding.weight, model.output
    model.token_embedding = VocabParallelEmbedding.from_embedding(model.token_embedding, group, leave)
    weight = model.token_embedding.weight if tied else own(padded(output.weight, group), group, ROWS)
    bias = None if output.bias is None else own(padded(output.bias, group), group, ROWS)
    model.output = ColumnParallelLinear(weight, bias, group, False, enter)
    model.group, model.by_tokens, model.__class__ = group, sequence_parallel, SplitGPT
    return model
