"""Splits the vocabulary into parts of unequal size, but computes the first row from its own size.

caught by: VocabParallelEmbedding · training
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    @classmethod
    def from_embedding(cls, embedding, group=None, leave=right.sum_over_ranks):
        parts = embedding.weight.detach().tensor_split(dist.get_world_size(group))
        return cls(parts[dist.get_rank(group)].clone(), group, leave)
