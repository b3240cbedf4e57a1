"""Takes contiguous rows of query_key_value, which are only queries on the first rank.

caught by: ParallelAttention · plain heads
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        query_key_value = right.ColumnParallelLinear.from_linear(attention.query_key_value, group, enter=enter)
        project = right.RowParallelLinear.from_linear(attention.project, group, leave)
        own_heads = attention.heads // dist.get_world_size(group)
        return cls(query_key_value, project, own_heads)
