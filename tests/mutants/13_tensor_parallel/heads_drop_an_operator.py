"""Does not pass `enter` on to query_key_value.

caught by: ParallelAttention · operators
"""

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        return super().from_attention(attention, group, leave=leave)
