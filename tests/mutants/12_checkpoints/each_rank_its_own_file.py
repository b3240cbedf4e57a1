"""Writes one file per rank, to be loaded by the same rank: no other number of ranks can resume.

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
    model_state, optimizer_state = model.state_dict(), optimizer.state_dict()
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    half.mkdir(parents=True, exist_ok=True)
    right.torch.save(state, half / f"{right.dist.get_rank()}.pt")
    right.dist.barrier()
    if right.dist.get_rank() == 0:
        half.rename(whole)
    right.dist.barrier()


def load_checkpoint(path, model, optimizer):
    state = right.torch.load(path / f"{right.dist.get_rank()}.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
