"""Clears the gradients, which the training loop may still need.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)
    optimizer.zero_grad()


def load_checkpoint(path, model, optimizer):
    return right.load_checkpoint(path, model, optimizer)
