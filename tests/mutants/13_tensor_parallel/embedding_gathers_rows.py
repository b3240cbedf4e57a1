"""Gathers the whole embedding in every forward.

caught by: VocabParallelEmbedding · wire
"""

from solutions import tensor_operators
from solutions import tensor_parallel as right


class VocabParallelEmbedding(right.VocabParallelEmbedding):
    def forward(self, tokens):
        tensor_operators.all_gather(self.weight.detach(), 0, self.group)
        return super().forward(tokens)
