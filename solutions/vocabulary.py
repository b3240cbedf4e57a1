# Built by `make notebooks` from source/13_tensor_parallel/lab.py: edit that, not this.
"""The vocabulary, split over the ranks: the embedding at the beginning of a model, and the loss at its end.

Shape legend: D model width, V vocabulary, t ranks of the group.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shared.sharded.layers import (
    IGNORED,
    as_shard,
    expect_in_vocabulary,
    expect_own_shards,
    expect_plain_embedding,
    like,
    mean_without,
    own_padding_idx,
)
from solutions.tensor_operators import own_shard, sum_over_ranks


def vocabulary_shard(rows: Tensor, group: ProcessGroup | None) -> Tensor:
    """Copy this rank's rows of a weight or bias that has one row per token, padded with zeros to a multiple of t.

    Shape: rows [V, ...]; returns [ceil(V / t), ...].
    """
    padding = -len(rows) % dist.get_world_size(group)
    padded = torch.cat([rows.detach(), rows.new_zeros(padding, *rows.shape[1:])])
    return like(rows, own_shard(padded, 0, group, "the vocabulary"))


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank has an equal part of the vocabulary.

    Args:
        weight: this rank's rows of the embedding.
        leave: the operator that adds up the ranks' rows.

    Shape: tokens [...]; returns [..., D].
    Communication: one all-reduce of the outputs' size in forward.
    """

    sharded = ("weight",)

    def __init__(
        self,
        weight: Tensor,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ):
        super().__init__()
        self.group, self.leave, self.weight = group, leave, as_shard(weight, group)
        self.vocabulary = len(self.weight) * dist.get_world_size(group)
        self.padding_idx: int | None = None  # among this rank's rows
        expect_own_shards(self, "weight")

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ) -> "VocabParallelEmbedding":
        """Keep this rank's part of an embedding that is the same on every rank.

        Raises:
            ValueError: for max_norm, scale_grad_by_freq and sparse, which are not supported.
        """
        expect_plain_embedding(embedding, group)
        own = cls(vocabulary_shard(embedding.weight, group), group, leave)
        own.vocabulary = embedding.num_embeddings
        own.padding_idx = own_padding_idx(embedding, len(own.weight), group)
        return own

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens."""
        expect_in_vocabulary(tokens, self.vocabulary)
        own_rows = len(self.weight)
        index = tokens - dist.get_rank(self.group) * own_rows
        elsewhere = (index < 0) | (index >= own_rows)
        found = F.embedding(index.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    group: ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the mean cross-entropy of logits that are split over the ranks along the vocabulary.

    As in F.cross_entropy, targets of ignore_index do not count.

    Shape: logits_shard [..., V / t]; targets [...]; returns a scalar.
    Communication: two all-reduces in forward, of one and two numbers per target; none in backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", §3.
    """
    # In float32 at least, as torch's own cross_entropy computes inside.
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    expect_in_vocabulary(targets, logits.shape[-1] * dist.get_world_size(group), ignore_index)
    maximum = logits.detach().amax(-1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - maximum.unsqueeze(-1)

    columns = logits.shape[-1]
    index = targets - dist.get_rank(group) * columns
    elsewhere = (index < 0) | (index >= columns)
    picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    own_sum, own_target_logit = shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)
    total, target_logit = sum_over_ranks(torch.stack([own_sum, own_target_logit]), group)
    return mean_without(total.log() - target_logit, targets == ignore_index)
