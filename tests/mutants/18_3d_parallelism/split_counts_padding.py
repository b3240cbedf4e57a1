"""Lets the logits of padding take part in the loss.

caught by: split_model · both axes
"""

from functools import partial

from shared.models import gpt_layers
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize
from solutions.vocabulary import vocab_parallel_cross_entropy


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)
    loss_fn = partial(vocab_parallel_cross_entropy, group=tp_group)
    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, pp_group)
