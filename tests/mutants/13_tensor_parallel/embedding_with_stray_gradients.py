"""Replaces rows of other ranks by zeros without autograd, so their tokens add gradients to row 0.

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
        found.data.masked_fill_(elsewhere.unsqueeze(-1), 0)
        return self.leave(found, self.group)
