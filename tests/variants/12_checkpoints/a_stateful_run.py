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


def clear(half):
    """On the last rank, remove what a failed attempt has left."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for path in (half, half.with_suffix(".before")):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    dist.barrier()


def rename(half):
    """On the last rank, put the new folder in the place of an old one."""
    if dist.get_rank() == dist.get_world_size() - 1:
        with contextlib.suppress(FileNotFoundError):
            half.with_suffix("").replace(half.with_suffix(".before"))
        half.replace(half.with_suffix(""))
        shutil.rmtree(half.with_suffix(".before"), ignore_errors=True)
    dist.barrier()


def save_checkpoint(folder, step, model, optimizer):
    half = Path(folder, f"step_{step}.half")
    clear(half)
    dcp.save({"run": Run(model, optimizer, step)}, checkpoint_id=str(half))
    dist.barrier()
    rename(half)


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
        clear(self.half)
        state = {"run": Run(model, optimizer, step)}
        self.future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(self.half), process_group=self.group)

    def wait(self):
        try:
            if self.future is not None:
                self.future.result()
                rename(self.half)
        finally:
            self.future = None
