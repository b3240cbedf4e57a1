"""Restores only the learning rate of each group's settings.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint  # noqa: F401


def get_state_dict(model, optimizer):
    model_state, optimizer_state = right.get_state_dict(model, optimizer)
    return {"model": model_state, "moments": optimizer_state["state"]}, optimizer_state["param_groups"]


def save_checkpoint(folder, step, model, optimizer):
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    if right.dist.get_rank() == 0:
        for left in (whole, half):
            right.shutil.rmtree(left, ignore_errors=True)
    right.dist.barrier()
    state, _ = get_state_dict(model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    right.dcp.save(state | {"rates": rates, "step": step}, checkpoint_id=half)
    if right.dist.get_rank() == 0:
        half.rename(whole)
    right.dist.barrier()


def load_checkpoint(path, model, optimizer):
    state, groups = get_state_dict(model, optimizer)
    state |= {"rates": [0.0 for _ in groups], "step": 0}
    right.dcp.load(state, checkpoint_id=path)
    optimizer_state = {"state": state["moments"], "param_groups": groups}
    right.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    for group, rate in zip(optimizer.param_groups, state["rates"], strict=True):
        group["lr"] = rate
    return state["step"]
