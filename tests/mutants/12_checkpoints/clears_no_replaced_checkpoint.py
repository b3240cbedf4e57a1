"""Never removes what a kill has left of the checkpoint that was replaced.

caught by: save_checkpoint · killed again
"""

import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from solutions.checkpoints import newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    half, final, old = (folder / f"step_{step}{suffix}" for suffix in (".half", "", ".old"))
    if dist.get_rank() == 0:
        shutil.rmtree(half, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=half)
    if dist.get_rank() == 0:
        if final.exists():
            final.rename(old)
        half.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
