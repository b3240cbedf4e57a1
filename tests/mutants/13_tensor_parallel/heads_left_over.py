"""Gives every rank heads // N heads and drops the rest.

caught by: ParallelAttention · rejections
"""

import torch.distributed as dist
from torch import nn

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        own_heads = attention.heads // dist.get_world_size(group)
        width = attention.project.in_features // attention.heads * own_heads
        query_key_value = nn.Linear(attention.project.out_features, 3 * width, bias=False)
        project = nn.Linear(width, attention.project.out_features, bias=False)
        return cls(query_key_value, project, own_heads)
