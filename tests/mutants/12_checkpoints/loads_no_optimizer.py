"""Restores the parameters but not the optimizer state.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint, save_checkpoint  # noqa: F401


def load_checkpoint(path, model, optimizer):
    state = {"model": right.get_state_dict(model, optimizer)[0], "step": 0}
    right.dcp.load(state, checkpoint_id=path)
    return state["step"]
