"""Does not pass `leave` on, so the layer always adds up with an all-reduce.

caught by: VocabParallelEmbedding · operators
"""

from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    @classmethod
    def from_embedding(cls, embedding, group=None, leave=right.sum_over_ranks):
        return super().from_embedding(embedding, group)
