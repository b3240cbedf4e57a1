# Built by `make notebooks` from source/13_tensor_parallel/lab.py: edit that, not this.
"""Tensor parallelism: every rank of a group sees the same batch and computes with its shard of every matrix.

Shape legend: B batch, T tokens, D model width, H heads, V vocabulary, t ranks of the group.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call

from shared.models import Attention, GatedMLP, TinyGPT
from shared.sharded.layers import (
    as_parameter,
    as_shard,
    expect_own_shards,
    expect_plain,
    expect_plain_gpt,
    like,
)
from solutions.tensor_operators import (
    concatenate_shards,
    copy_all_to_ranks,
    copy_to_ranks,
    gather_tokens,
    own_shard,
    scatter_tokens,
    sum_over_ranks,
)
from solutions.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocabulary_shard


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes an equal part of the outputs.

    Args:
        weight: this rank's rows of the weight, [outputs / t, inputs].
        bias: the same part of the bias, or None.
        gather_output: whether forward returns the outputs of all ranks.
        enter: the operator that lets each rank compute something different from the inputs.

    Shape: inputs [..., inputs]; returns [..., outputs / t], or [..., outputs] with gather_output.
    Communication: one all-reduce of the inputs' size in backward. With gather_output, one all-gather in forward.
    """

    # The parameters that are split. All others are the same on every rank.
    sharded = ("weight", "bias")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        group: ProcessGroup | None = None,
        *,
        gather_output: bool = False,
        enter: Callable = copy_to_ranks,
    ):
        super().__init__()
        self.group, self.gather_output, self.enter = group, gather_output, enter
        self.weight = as_shard(weight, group)
        self.bias = None if bias is None else as_shard(bias, group)
        expect_own_shards(self, "weight", "bias")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        gather_output: bool = False,
        *,
        enter: Callable = copy_to_ranks,
    ) -> "ColumnParallelLinear":
        """Keep this rank's part of a layer that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of outputs.
        """
        expect_plain(linear, nn.Linear, group)
        weight = own_shard(linear.weight, 0, group, "the outputs of a linear layer")
        bias = None if linear.bias is None else own_shard(linear.bias, 0, group, "the bias")
        return cls(weight, bias, group, gather_output=gather_output, enter=enter)

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's part of the outputs, or all of them with gather_output."""
        shard = F.linear(self.enter(x, self.group), self.weight, self.bias)
        return concatenate_shards(shard, self.group) if self.gather_output else shard


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has an equal part of the inputs, and a partial sum of all outputs.

    Args:
        weight: this rank's columns of the weight, [outputs, inputs / t].
        bias: the whole bias, or None. It is the same on every rank.
        leave: the operator that adds up the partial sums.

    Shape: inputs [..., inputs / t]; returns [..., outputs].
    Communication: one all-reduce of the outputs' size in forward.
    """

    sharded = ("weight",)

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ):
        super().__init__()
        self.group, self.leave = group, leave
        self.weight = as_shard(weight, group)
        self.bias = None if bias is None else as_parameter(bias)
        expect_own_shards(self, "weight")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ) -> "RowParallelLinear":
        """Keep this rank's part of a layer that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of inputs.
        """
        expect_plain(linear, nn.Linear, group)
        weight = own_shard(linear.weight, 1, group, "the inputs of a linear layer")
        bias = None if linear.bias is None else like(linear.bias, linear.bias.detach().clone())
        return cls(weight, bias, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all outputs, together with the other ranks, from this rank's part of the inputs."""
        total = self.leave(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


class ParallelAttention(nn.Module):
    """Causal self-attention of which each rank computes an equal part of the heads.

    Shape: inputs and outputs [B, T, D].
    Communication: one all-reduce of the inputs' size in forward and one in backward.
    """

    def __init__(self, query_key_value: ColumnParallelLinear, project: RowParallelLinear, own_heads: int):
        super().__init__()
        self.query_key_value, self.project, self.own_heads = query_key_value, project, own_heads

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        own = self.query_key_value(x).unflatten(-1, (3, self.own_heads, -1))
        query, key, value = own.permute(2, 0, 3, 1, 4)  # each (B, H/t, T, D/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))  # (B, T, D)

    @classmethod
    def from_attention(
        cls,
        attention: Attention,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
        leave: Callable = sum_over_ranks,
    ) -> "ParallelAttention":
        """Keep this rank's heads of an attention that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of heads.
        """

        # The rows of this rank's heads, of a weight or a bias.
        def own_rows(rows: Tensor) -> Tensor:
            by_head = rows.unflatten(0, (3, attention.heads, -1))
            return like(rows, own_shard(by_head, 1, group, "the heads of attention").flatten(0, 2))

        whole = attention.query_key_value
        bias = None if whole.bias is None else own_rows(whole.bias)
        return cls(
            ColumnParallelLinear(own_rows(whole.weight), bias, group, enter=enter),
            RowParallelLinear.from_linear(attention.project, group, leave),
            own_heads=attention.heads // dist.get_world_size(group),
        )


class ParallelGatedMLP(nn.Module):
    """A gated MLP of which each rank has an equal part of the inner elements.

    Shape: inputs and outputs [B, T, D].
    Communication: one all-reduce of the inputs' size in forward and one in backward.
    """

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, T, M/t)
        return self.down(F.silu(gate) * up)

    @classmethod
    def from_mlp(
        cls,
        mlp: GatedMLP,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
        leave: Callable = sum_over_ranks,
    ) -> "ParallelGatedMLP":
        """Keep this rank's inner elements of a gated MLP that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of inner elements.
        """
        by_half = mlp.gate_up.weight.unflatten(0, (2, -1))
        own_rows = own_shard(by_half, 1, group, "the inner elements of a gated MLP").flatten(0, 1)
        gate_up = ColumnParallelLinear(own_rows, None, group, enter=enter)
        return cls(gate_up, RowParallelLinear.from_linear(mlp.down, group, leave))


def sharded_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of which each rank has its own shard."""
    return {f"{path}.{name}" for path, layer in model.named_modules() for name in getattr(layer, "sharded", ())}


class ParallelGPT(TinyGPT):
    """A TinyGPT of which each rank has its shard of every matrix. parallelize() builds it.

    With `sequence_parallel`, everything between two parallel layers is computed on this rank's tokens only. torch's
    layers that mix tokens are refused, but a layer or hook of your own that does cannot be seen, and would be wrong.
    Without it, all ranks must draw the same dropout masks there: the first forward that draws one compares their seeds.

    Memory: 1/t of the matrices, and all of the position embedding and the norms.
    Communication: per layer, two all-reduces of B · T · D elements in forward and two in backward; with
        sequence_parallel, four all-gathers and four reduce-scatters, and one all-reduce of the replicated parameters'
        gradients. The embedding adds one collective, the output layer one, and the loss three numbers per target.
    """

    group: ProcessGroup | None
    sequence_parallel: bool

    def forward(self, tokens: Tensor, targets: Tensor | None = None, has_copies: bool = False):
        """Return whole logits (B, T, V), or the mean loss if targets are given."""
        if self.sequence_parallel and not has_copies:
            # Call forward again, with copies in place of the replicated parameters.
            return functional_call(self, self.replicated_copies(), (tokens, targets, True))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.sequence_parallel:
            positions = own_shard(positions, 0, self.group, "the tokens")
        # (B, T, D), or with sequence parallelism (B, T/t, D)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))  # (B, T, V/t)
        if targets is None:
            return concatenate_shards(logits, self.group)[..., : self.config.vocab_size]
        columns = logits.shape[-1]
        used = self.config.vocab_size - dist.get_rank(self.group) * columns
        if used < columns:
            logits[..., max(used, 0) :] = -torch.inf
        return vocab_parallel_cross_entropy(logits, targets, self.group)

    def replicated_copies(self) -> dict[str, Tensor]:
        """Return the replicated parameters by name, as tensors whose gradients are added up over the ranks."""
        sharded = sharded_names(self)
        replicated = {n: p for n, p in self.named_parameters() if n not in sharded}
        copies = copy_all_to_ranks(list(replicated.values()), self.group)
        return dict(zip(replicated, copies, strict=True))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most max_norm.

        Returns:
            The norm before scaling, the same on every rank.

        Communication: one all-reduce of one element.
        """
        sharded = sharded_names(self)
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        squares = {name: gradient.double().square().sum() for name, gradient in gradients.items()}
        zero = torch.zeros((), dtype=torch.float64, device=self.norm.weight.device)
        total = sum((square for name, square in squares.items() if name in sharded), zero)
        dist.all_reduce(total, group=self.group)
        norm = sum((square for name, square in squares.items() if name not in sharded), total).sqrt()
        for gradient in gradients.values():
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


def parallelize(model: TinyGPT, group: ProcessGroup | None = None, sequence_parallel: bool = False) -> ParallelGPT:
    """Split a TinyGPT in place. It must be the same on every rank. Frozen parameters stay frozen.

    Raises:
        ValueError: if t does not divide the number of heads, or if the ranks have different models.
    """
    expect_plain_gpt(model, group)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    enter, leave = (gather_tokens, scatter_tokens) if sequence_parallel else (copy_to_ranks, sum_over_ranks)
    embedding, output = model.token_embedding, model.output
    output_bias = None if output.bias is None else vocabulary_shard(output.bias, group)
    for block in model.blocks:
        block.attention = ParallelAttention.from_attention(block.attention, group, enter, leave)
        block.up = ColumnParallelLinear.from_linear(block.up, group, enter=enter)
        block.down = RowParallelLinear.from_linear(block.down, group, leave)
    model.token_embedding = VocabParallelEmbedding.from_embedding(embedding, group, leave)
    output_weight = vocabulary_shard(output.weight, group)
    model.output = ColumnParallelLinear(output_weight, output_bias, group, enter=enter)
    if output.weight is embedding.weight:
        model.output.weight = model.token_embedding.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.group, model.sequence_parallel = group, sequence_parallel
    model.__class__ = ParallelGPT
    return model
