"""Starts a thread without staging, so it writes what training has changed meanwhile.

caught by: BackgroundSaver · background
"""

from concurrent.futures import ThreadPoolExecutor

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def save(self, folder, step, model, optimizer):
        self.wait()
        unfinished = right.begin_checkpoint(folder, step)
        model_state, optimizer_state = right.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        options = {"checkpoint_id": unfinished, "process_group": self._group}
        future = ThreadPoolExecutor(1).submit(right.dcp.save, state, **options)
        self._pending = future, folder, step
