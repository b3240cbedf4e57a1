"""Computes the loss over all ranks instead of the tp ranks.

caught by: split_model · plain split
"""

from functools import partial

import torch.distributed as dist

from shared.models import gpt_layers
from solutions.parallel_3d import token_loss
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)
    loss_fn = partial(token_loss, vocab_size=model.config.vocab_size, group=dist.group.WORLD)
    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, pp_group)
