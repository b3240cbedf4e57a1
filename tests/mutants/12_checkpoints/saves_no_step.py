"""Saves the model and the optimizer, but not the step.

caught by: save_checkpoint · own shard
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    unfinished = right.begin_checkpoint(folder, step)
    model_state, optimizer_state = right.get_state_dict(model, optimizer)
    right.dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=unfinished)
    right.complete_checkpoint(folder, step)
