"""Builds query_key_value without the operator, so that the inputs' gradient stays partial.

caught by: ParallelAttention · plain heads
"""

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        return super().from_attention(attention, group, lambda x, group: x, leave)
