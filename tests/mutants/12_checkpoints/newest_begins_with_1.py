"""Takes step 0 for no step.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    newest = 0
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            newest = max(newest, int(number))
    return folder / f"step_{newest}" if newest else None
