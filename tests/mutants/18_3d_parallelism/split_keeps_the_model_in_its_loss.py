"""Asks the whole model for the size of the vocabulary, so that loss_fn keeps the layers of all stages.

caught by: split_model · memory
"""

from shared.models import gpt_layers
from solutions.parallel_3d import token_loss
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)

    def loss_fn(logits, targets):
        return token_loss(logits, targets, vocab_size=model.config.vocab_size, group=tp_group)

    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, pp_group)
