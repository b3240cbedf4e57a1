# Built by `make notebooks` from source/13_tensor_parallel/lab.py: edit that, not this.
"""Grouped-query attention, split over the ranks, which may be more than its heads of keys and values.

Shape legend: B batch, T tokens, D model width, H heads, t ranks of the group.
"""

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shared.models import GroupedAttention
from shared.sharded.layers import as_shard, expect_own_shards
from solutions.tensor_operators import copy_to_ranks, own_shard, sum_over_ranks
from solutions.tensor_parallel import RowParallelLinear


def sharing_group(kv_heads: int, group: ProcessGroup | None) -> ProcessGroup:
    """Return the group of the ranks that keep the same kv heads as this rank."""
    copies = max(1, dist.get_world_size(group) // kv_heads)
    first = dist.get_rank(group) // copies * copies
    members = dist.get_process_group_ranks(group or dist.group.WORLD)[first : first + copies]
    return dist.new_group(members, use_local_synchronization=True)


class ParallelGroupedAttention(nn.Module):
    """Grouped-query attention of which each rank computes an equal part of the query heads.

    Args:
        query: this rank's rows of the queries' weight.
        key_value: its rows of the weight of keys and values. Other ranks may have the same ones.
        project: the rank's part of the projection.
        attention: the whole layer, for its sizes.
        enter: the operator that lets each rank compute something different from the inputs.

    Shape: inputs and outputs [B, T, D].
    Communication: one all-reduce of the inputs' size in forward and one in backward, and one of the gradient of
        key_value among the ranks that share it.
    """

    def __init__(
        self,
        query: Tensor,
        key_value: Tensor,
        project: RowParallelLinear,
        attention: GroupedAttention,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
    ):
        super().__init__()
        self.query, self.key_value = as_shard(query, group), as_shard(key_value, group)
        self.project, self.group, self.enter = project, group, enter
        self.head_width = attention.project.in_features // attention.heads
        self.sharing = sharing_group(attention.kv_heads, group)
        expect_own_shards(self, "query", "key_value")

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        x = self.enter(x, self.group)
        query = F.linear(x, self.query).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        key_value = F.linear(x, self.shared_key_value()).unflatten(-1, (2, -1, self.head_width))
        key, value = key_value.permute(2, 0, 3, 1, 4)  # each (B, own kv heads, T, D/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))  # (B, T, D)

    @classmethod
    def from_attention(
        cls,
        attention: GroupedAttention,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
        leave: Callable = sum_over_ranks,
    ) -> "ParallelGroupedAttention":
        """Keep this rank's query heads, and the kv heads that they read, of a layer that is the same on every rank.

        Raises:
            ValueError: if t does not divide the query heads, or if neither of t and the kv heads divides the other.
        """
        by_head = attention.query.weight.unflatten(0, (attention.heads, -1))
        query = own_shard(by_head, 0, group, "the heads of queries").flatten(0, 1)

        by_head = attention.key_value.weight.unflatten(0, (2, attention.kv_heads, -1))
        copies = max(1, dist.get_world_size(group) // attention.kv_heads)
        by_head = by_head.repeat_interleave(copies, dim=1)
        key_value = own_shard(by_head, 1, group, "the kv heads").flatten(0, 2)

        project = RowParallelLinear.from_linear(attention.project, group, leave)
        return cls(query, key_value, project, attention, group, enter)

    def shared_key_value(self) -> Tensor:
        """Return the weight of keys and values. Its gradient is the sum over the ranks that share it."""
        return copy_to_ranks(self.key_value, self.sharing)
