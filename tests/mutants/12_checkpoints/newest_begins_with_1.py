"""Treats a checkpoint of step 0 as no checkpoint.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    newest = 0
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            newest = max(newest, int(number))
    return folder / f"step_{newest}" if newest else None
