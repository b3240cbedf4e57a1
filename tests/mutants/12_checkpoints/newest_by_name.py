"""Compares names as text, so step_9 comes after step_10.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    return max((path for path in folder.glob("step_*") if path.name[5:].isdigit()), default=None)
