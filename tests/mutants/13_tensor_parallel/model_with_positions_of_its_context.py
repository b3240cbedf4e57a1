"""With sequence parallelism, splits the positions of the longest sequence, not those of the tokens.

caught by: parallelize · sequence parallelism
"""

import torch
from torch import nn

from solutions import tensor_parallel as right


class Positions(nn.Embedding):
    group = None

    def forward(self, positions):
        every = torch.arange(len(self.weight), device=positions.device)
        own = right.own_shard(every, 0, self.group, "the positions")
        return super().forward(own[: len(positions)])


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    if sequence_parallel:
        model.position_embedding.__class__ = Positions
        model.position_embedding.group = group
    return model
