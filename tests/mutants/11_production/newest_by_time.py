"""Takes what was touched last: a copy or a restored backup changes that.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    whole = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return max(whole, key=lambda path: path.stat().st_mtime, default=None)
