"""Adds its row 0 for every token of another rank.

caught by: VocabParallelEmbedding · plain vocabulary
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    def forward(self, tokens):
        own_rows = len(self.weight)
        index = tokens - dist.get_rank(self.group) * own_rows
        elsewhere = (index < 0) | (index >= own_rows)
        found = right.F.embedding(index.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found, self.group)
