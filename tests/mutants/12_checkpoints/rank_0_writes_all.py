"""Gathers the full state and writes it from rank 0 with torch.save.

caught by: save_checkpoint · own shard
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    if right.dist.get_rank() == 0:
        for left in (whole, half):
            right.shutil.rmtree(left, ignore_errors=True)
    right.dist.barrier()
    model_state, optimizer_state = right.get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    if right.dist.get_rank() == 0:
        half.mkdir()
        right.torch.save(state, half / "all.pt")
    if right.dist.get_rank() == 0:
        half.rename(whole)
    right.dist.barrier()
