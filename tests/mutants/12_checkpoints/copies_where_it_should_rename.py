"""Copies the half-written folder to its final name, file by file, instead of renaming it.

caught by: save_checkpoint · all ranks return
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    if right.dist.get_rank() == 0:
        for left in (whole, half):
            right.shutil.rmtree(left, ignore_errors=True)
    right.dist.barrier()
    model_state, optimizer_state = right.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    right.dcp.save(state, checkpoint_id=half)
    if right.dist.get_rank() == 0:
        right.shutil.copytree(half, whole)
        right.shutil.rmtree(half)
    right.dist.barrier()
