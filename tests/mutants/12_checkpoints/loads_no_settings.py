"""Loads tensors in place and never calls set_state_dict(), so the learning rate stays at its initial value.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint, save_checkpoint  # noqa: F401


def load_checkpoint(path, model, optimizer):
    model_state, optimizer_state = right.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    right.dcp.load(state, checkpoint_id=path)
    return state["step"]
