"""Takes every name that is a number once step_ is removed, so a folder called 12 counts as a checkpoint, too.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    steps = {}
    for path in folder.glob("*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            steps[int(number)] = path
    return steps[max(steps)] if steps else None
