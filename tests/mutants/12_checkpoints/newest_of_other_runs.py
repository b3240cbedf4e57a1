"""Searches the folders inside the folder too, which may belong to other runs.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    whole = [path for path in folder.rglob("step_*") if path.name.removeprefix("step_").isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)
