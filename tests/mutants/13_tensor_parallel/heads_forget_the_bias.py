"""Leaves out the bias of query_key_value.

caught by: ParallelAttention · training
"""

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        own = super().from_attention(attention, group, enter, leave)
        own.query_key_value.bias = None
        return own
