"""Fails if the folder contains anything other than checkpoints.

caught by: newest_checkpoint · newest
"""


def newest_checkpoint(folder):
    whole = [path for path in folder.iterdir() if not path.name.endswith(".half")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)
