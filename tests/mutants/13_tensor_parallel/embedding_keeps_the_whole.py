"""Keeps the whole embedding beside its shard.

caught by: VocabParallelEmbedding · memory
"""

from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    @classmethod
    def from_embedding(cls, embedding, group=None, leave=right.sum_over_ranks):
        own = super().from_embedding(embedding, group, leave)
        own.whole = [embedding.weight]
        return own
