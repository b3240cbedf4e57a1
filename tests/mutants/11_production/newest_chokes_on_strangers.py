"""Expects nothing else in the folder than what it wrote.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    whole = [path for path in folder.iterdir() if not path.name.endswith(".half")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)
