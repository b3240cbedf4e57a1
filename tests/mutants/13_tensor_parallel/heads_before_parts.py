"""Orders its rows by head first, although forward expects queries, keys and values first.

caught by: ParallelAttention · plain heads
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        rows = attention.query_key_value.weight.unflatten(0, (3, attention.heads, -1)).transpose(0, 1)
        weight = right.own_shard(rows, 0, group, "the heads of attention").flatten(0, 2)
        query_key_value = right.ColumnParallelLinear(weight, None, group, enter=enter)
        project = right.RowParallelLinear.from_linear(attention.project, group, leave)
        own_heads = attention.heads // dist.get_world_size(group)
        return cls(query_key_value, project, own_heads)
