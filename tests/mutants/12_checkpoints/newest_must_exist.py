"""Raises an error for an empty folder instead of returning None.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    whole = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return max(whole, key=lambda path: int(path.name[5:]))
