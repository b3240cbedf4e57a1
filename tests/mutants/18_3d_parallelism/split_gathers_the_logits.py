"""Gathers the logits of the whole vocabulary on every tp rank, and uses torch's loss.

caught by: split_model · wire
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

from shared.models import gpt_layers
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)
    vocab_size, index = model.config.vocab_size, dist.get_rank(tp_group)

    def loss_fn(logits, targets):
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(tp_group))]
        dist.all_gather(parts, logits.detach(), group=tp_group)
        parts[index] = logits
        whole = torch.cat(parts, dim=-1)[..., :vocab_size]
        return F.cross_entropy(whole.flatten(0, 1), targets.flatten())

    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, pp_group)
