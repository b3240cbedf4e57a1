"""Never looks up its last row.

caught by: VocabParallelEmbedding · plain vocabulary
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    def forward(self, tokens):
        own_rows = len(self.weight)
        index = tokens - dist.get_rank(self.group) * own_rows
        elsewhere = (index < 0) | (index >= own_rows - 1)
        found = right.F.embedding(index.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)
