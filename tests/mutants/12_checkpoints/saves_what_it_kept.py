"""Gets the state dicts only once and saves them again: tensors are up to date, but the step and settings are not.

caught by: load_checkpoint · earlier checkpoint
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint  # noqa: F401

kept = {}


def save_checkpoint(folder, step, model, optimizer):
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    if right.dist.get_rank() == 0:
        for left in (whole, half):
            right.shutil.rmtree(left, ignore_errors=True)
    right.dist.barrier()
    if not kept:
        model_state, optimizer_state = right.get_state_dict(model, optimizer)
        kept.update(model=model_state, optimizer=optimizer_state, step=step)
    right.dcp.save(kept, checkpoint_id=half)
    if right.dist.get_rank() == 0:
        half.rename(whole)
    right.dist.barrier()


def load_checkpoint(path, model, optimizer):
    return right.load_checkpoint(path, model, optimizer)
