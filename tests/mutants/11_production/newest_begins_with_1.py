"""Takes step 0 for no step.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    newest = 0
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            newest = max(newest, int(number))
    return folder / f"step_{newest}" if newest else None
