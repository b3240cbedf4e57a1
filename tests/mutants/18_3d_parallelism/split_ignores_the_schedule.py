"""Always runs a schedule for two stages.

caught by: split_model · both axes
"""

from functools import partial

from shared.models import gpt_layers
from solutions.parallel_3d import token_loss
from solutions.pipeline import Pipeline
from solutions.pipeline_schedules import one_f_one_b
from solutions.tensor_parallel import parallelize


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)
    loss_fn = partial(token_loss, vocab_size=model.config.vocab_size, group=tp_group)
    return Pipeline(gpt_layers(model), one_f_one_b(2, micro_batches), micro_batches, loss_fn, pp_group)
