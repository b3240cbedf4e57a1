"""Returns the step as a tensor, so the next folder would be called step_tensor(8).

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint, save_checkpoint  # noqa: F401


def load_checkpoint(path, model, optimizer):
    return right.torch.tensor(right.load_checkpoint(path, model, optimizer))
