"""An empty folder is an error.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    whole = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return max(whole, key=lambda path: int(path.name[5:]))
