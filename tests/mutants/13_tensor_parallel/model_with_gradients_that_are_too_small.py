"""Averages the gradients of the embedding: AdamW divides the factor out again, but not its weight decay.

caught by: parallelize · plain model
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    size = dist.get_world_size(group)
    model.token_embedding.weight.register_hook(lambda gradient: gradient / size)
    return model
