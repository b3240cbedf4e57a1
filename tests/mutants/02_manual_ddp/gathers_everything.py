"""All-gathers every rank's tensor and averages locally: N times the bytes.

caught by: mean_over_ranks_ · wire
"""

import torch
import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def mean_over_ranks_(tensor, group=None):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    tensor.copy_(torch.stack(gathered).mean(0))
