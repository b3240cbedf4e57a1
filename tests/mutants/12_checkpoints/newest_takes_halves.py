"""Ignores what follows the number, so it accepts half-written checkpoints.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    found = [path for path in folder.glob("step_*") if path.name[5:].split(".")[0].isdigit()]
    return max(found, key=lambda path: int(path.name[5:].split(".")[0]), default=None)
