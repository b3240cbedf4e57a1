"""Saves and loads through a Stateful object; the last rank removes old folders and renames, also in the background."""

import contextlib
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class Run(Stateful):
    """The state of a run, as torch.distributed.checkpoint expects it."""

    def __init__(self, model, optimizer, step=0):
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def save_checkpoint(folder, step, model, optimizer):
    half = Path(folder, f"step_{step}.half")
    if dist.get_rank() == dist.get_world_size() - 1:  # the last rank removes old folders and renames
        for path in (half, half.with_suffix("")):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    dist.barrier()
    dcp.save({"run": Run(model, optimizer, step)}, checkpoint_id=str(half))
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        half.replace(half.with_suffix(""))
    dist.barrier()


def newest_checkpoint(folder):
    found = None
    for path in sorted(Path(folder).glob("step_*")):
        with contextlib.suppress(ValueError):
            number = int(path.name.split("step_", 1)[1])
            found = max(found or (number, path), (number, path))
    return found and found[1]


def load_checkpoint(path, model, optimizer):
    run = Run(model, optimizer)
    dcp.load({"run": run}, checkpoint_id=path)
    return run.step


class BackgroundSaver:
    """Stages through the Stateful object; save() and wait() share one method that completes what is pending."""

    future = half = None

    def __init__(self):
        self.group = dist.new_group(ranks=list(range(dist.get_world_size())), backend="gloo")

    def save(self, folder, step, model, optimizer):
        self.wait()
        self.half = Path(folder, f"step_{step}.half")
        if dist.get_rank() == 0:
            for path in (self.half, self.half.with_suffix("")):
                shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        state = {"run": Run(model, optimizer, step)}
        self.future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(self.half), process_group=self.group)

    def wait(self):
        try:
            if self.future is not None:
                self.future.result()
                if dist.get_rank() == dist.get_world_size() - 1:
                    self.half.rename(self.half.with_suffix(""))
                dist.barrier()
        finally:
            self.future = None
