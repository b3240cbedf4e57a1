"""Writes without coordination if nothing is sharded: all ranks write the same files, even while rank 0 renames their
folder.

caught by: save_checkpoint · all or nothing
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    if any(hasattr(each, "placements") for each in model.parameters()):
        right.save_checkpoint(folder, step, model, optimizer)
        return
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    for left in (whole, half):
        right.shutil.rmtree(left, ignore_errors=True)
    right.dist.barrier()
    model_state, optimizer_state = right.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    right.dcp.save(state, checkpoint_id=half, no_dist=True)
    if right.dist.get_rank() == 0:
        half.rename(whole)
    right.dist.barrier()
