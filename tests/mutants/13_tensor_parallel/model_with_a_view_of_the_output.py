"""The output layer's weight is a view of the whole one, which costs nothing only where it is tied.

caught by: parallelize · memory
"""

import torch.distributed as dist
from torch import nn

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    whole = model.output.weight
    is_tied = whole is model.token_embedding.weight
    model = right.parallelize(model, group, sequence_parallel)
    if not is_tied and len(whole) % dist.get_world_size(group) == 0:
        own = whole.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
        model.output.weight = nn.Parameter(own)
    return model
