"""Saves in eval mode, and trains on in it.

caught by: save_checkpoint · resumed
"""

from solutions import production as right
from solutions.production import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model.eval(), optimizer)
