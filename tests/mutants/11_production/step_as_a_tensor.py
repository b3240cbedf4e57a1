"""Gives back the tensor that it loaded: the next folder would be called step_tensor(8).

caught by: save_checkpoint · resumed
"""

from solutions import production as right
from solutions.production import newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def load_checkpoint(path, model, optimizer):
    return right.torch.tensor(right.load_checkpoint(path, model, optimizer))
