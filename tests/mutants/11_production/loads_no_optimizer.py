"""Parameters come back, moments do not.

caught by: save_checkpoint · resumed
"""

from solutions import production as right
from solutions.production import newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def load_checkpoint(path, model, optimizer):
    state = {"model": right.get_state_dict(model, optimizer)[0], "step": 0}
    right.dcp.load(state, checkpoint_id=path)
    return state["step"]
