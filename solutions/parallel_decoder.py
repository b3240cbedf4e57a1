"""Tensor parallelism for the dry run's decoder, with the layers of chapter 13.

Its attention has separate queries, keys and values, and its MLP may have a gate. Otherwise it is split like a TinyGPT.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from shared.dryrun.decoder import MLP, Decoder
from solutions.tensor_operators import (
    copy_all_to_ranks,
    copy_to_ranks,
    gather_tokens,
    own_shard,
    scatter_tokens,
    sum_over_ranks,
)
from solutions.tensor_parallel import ColumnParallelLinear, RowParallelLinear, sharded_names
from solutions.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocabulary_shard


class ParallelDecoder(Decoder):
    """A decoder of which each rank has its shard of every matrix. parallelize_decoder() builds it."""

    group: ProcessGroup | None
    sequence_parallel: bool
    vocabulary: int

    def forward(self, tokens: Tensor, targets: Tensor, has_copies: bool = False) -> Tensor:
        """Return the mean loss."""
        if self.sequence_parallel and not has_copies:
            sharded = sharded_names(self)
            replicated = {name: p for name, p in self.named_parameters() if name not in sharded}
            copies = copy_all_to_ranks(list(replicated.values()), self.group)
            return functional_call(self, dict(zip(replicated, copies, strict=True)), (tokens, targets, True))
        x = self.tokens(tokens)  # (B, T, D), or with sequence parallelism (B, T/N, D)
        if self.positions is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            if self.sequence_parallel:
                positions = own_shard(positions, 0, self.group, "the tokens")
            x = x + self.positions(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        logits = self.output(self.norm(x)).float()  # (B, T, V/N)
        columns = logits.shape[-1]
        used = self.vocabulary - dist.get_rank(self.group) * columns
        if used < columns:
            logits[..., max(used, 0) :] = -torch.inf
        return vocab_parallel_cross_entropy(logits, targets, self.group)


def parallelize_decoder(
    model: Decoder, group: ProcessGroup | None = None, sequence_parallel: bool = False
) -> ParallelDecoder:
    """Split a decoder in place. It must be the same on every rank.

    Raises:
        ValueError: If the number of ranks does not divide the heads of keys and values, or a width, or if layers have
            experts.
    """
    enter, leave = (gather_tokens, scatter_tokens) if sequence_parallel else (copy_to_ranks, sum_over_ranks)
    size = dist.get_world_size(group)

    def columns(linear: nn.Linear) -> ColumnParallelLinear:
        return ColumnParallelLinear.from_linear(linear, group, enter=lambda x, group: x)

    def enter_once(_layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Let several column-parallel layers share the collectives of their common input."""
        return (enter(inputs[0], group),)

    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(mlp, MLP):
            raise ValueError("cannot split layers of experts: only expert parallelism, strategy ep, divides these")
        if attention.kv_heads % size:
            raise ValueError(
                f"cannot split attention evenly: {attention.kv_heads} heads of keys and values are not divisible by "
                f"{size}, the number of ranks"
            )
        attention.query, attention.key, attention.value = map(
            columns, (attention.query, attention.key, attention.value)
        )
        attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
        attention.project = RowParallelLinear.from_linear(attention.project, group, leave)
        mlp.up, mlp.down = columns(mlp.up), RowParallelLinear.from_linear(mlp.down, group, leave)
        mlp.gate = None if mlp.gate is None else columns(mlp.gate)
        for layer_with_columns in (attention, mlp):
            layer_with_columns.register_forward_pre_hook(enter_once)
    tied, output = model.output.weight is model.tokens.weight, model.output
    model.vocabulary, model.group, model.sequence_parallel = len(output.weight), group, sequence_parallel
    model.tokens = VocabParallelEmbedding.from_embedding(model.tokens, group, leave)
    model.output = ColumnParallelLinear(vocabulary_shard(output.weight, group), None, group, enter=enter)
    if tied:
        model.output.weight = model.tokens.weight
    model.__class__ = ParallelDecoder
    return model
