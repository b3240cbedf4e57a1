"""Deletes the checkpoint of the same step under its final name, so a kill halfway leaves a part of it.

caught by: save_checkpoint · leftovers
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    whole, half = folder / f"step_{step}", right.begin_checkpoint(folder, step)
    model_state, optimizer_state = right.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    right.dcp.save(state, checkpoint_id=half)
    if right.dist.get_rank() == 0:
        right.shutil.rmtree(whole, ignore_errors=True)
        half.rename(whole)
    right.dist.barrier()
