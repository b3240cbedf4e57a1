"""Finds its first row by its rank in the world.

caught by: VocabParallelEmbedding · group
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    def forward(self, tokens):
        own_rows = len(self.weight)
        index = tokens - dist.get_rank() * own_rows
        elsewhere = (index < 0) | (index >= own_rows)
        found = right.F.embedding(index.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)
