"""Concatenates the results of all heads, and keeps the whole projection on every rank.

caught by: ParallelAttention · plain heads
"""

from solutions import tensor_parallel as right


class ParallelAttention(right.ParallelAttention):
    @classmethod
    def from_attention(cls, attention, group=None, enter=right.copy_to_ranks, leave=right.sum_over_ranks):
        own = super().from_attention(attention, group, enter, leave)
        own.project = attention.project
        own.gathers = group
        return own

    def forward(self, x):
        own = self.query_key_value(x).unflatten(-1, (3, self.own_heads, -1))
        query, key, value = own.permute(2, 0, 3, 1, 4)
        mixed = right.F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(right.concatenate_shards(mixed.transpose(1, 2).flatten(-2), self.gathers))
