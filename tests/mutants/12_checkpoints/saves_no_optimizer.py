"""Neither saves nor loads the optimizer state.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    if right.dist.get_rank() == 0:
        for left in (whole, half):
            right.shutil.rmtree(left, ignore_errors=True)
    right.dist.barrier()
    model_state, _ = right.get_state_dict(model, optimizer)
    state = {"model": model_state, "step": step}
    right.dcp.save(state, checkpoint_id=half)
    if right.dist.get_rank() == 0:
        half.rename(whole)
    right.dist.barrier()


def load_checkpoint(path, model, optimizer):
    state = {"model": right.get_state_dict(model, optimizer)[0], "step": 0}
    right.dcp.load(state, checkpoint_id=path)
    return state["step"]
