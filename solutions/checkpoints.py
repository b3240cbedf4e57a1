# Built by `make notebooks` from source/12_checkpoints/lab.py: edit that, not this.
"""Sharded checkpoints that no crash can corrupt, and that any number of ranks can load."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,  # noqa: F401, for your solution
    set_state_dict,
)

from shared.sharded.checkpoints import states_of, states_to_load


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the largest step, or None if there is none."""
    suffixes = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    steps = {path: int(suffix) for path, suffix in suffixes.items() if suffix.isdigit()}
    return max(steps, key=steps.get, default=None)


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Remove what earlier attempts at this step have left. Returns the folder for the shards."""
    unfinished, replaced = (folder / f"step_{step}{suffix}" for suffix in (".half", ".old"))
    if dist.get_rank() == 0:
        for leftover in (unfinished, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    dist.barrier()  # no rank returns before the leftovers are removed
    return unfinished


def complete_checkpoint(folder: Path, step: int) -> None:
    """Give a checkpoint its final name, when all ranks have written their shards."""
    complete, unfinished, replaced = (folder / f"step_{step}{suffix}" for suffix in ("", ".half", ".old"))
    if dist.get_rank() == 0:
        if complete.exists():
            # A kill during a deletion would leave an incomplete checkpoint, so it must not have this name any more.
            complete.rename(replaced)
        unfinished.rename(complete)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()  # no rank may return before rank 0 has renamed the folder


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that gets its final name only when it is complete. To be called by all ranks."""
    unfinished = begin_checkpoint(folder, step)
    model_state, optimizer_state = states_of(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=unfinished)  # if one rank fails, it raises on all ranks
    complete_checkpoint(folder, step)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, which any number of ranks may have written. Returns its step."""
    with states_to_load(path, model, optimizer) as (model_state, optimizer_state):
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=path)  # fills the tensors in place and replaces the step
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # some parameters may have no state
        )
    return state["step"]


class BackgroundSaver:
    """Saves in a thread while training goes on, one checkpoint at a time. To be used by all ranks."""

    def __init__(self):
        self._group = dist.new_group(backend="gloo")
        self._pending = None  # the future of the save in flight, and its folder and step

    def save(self, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the save before this one, and start to save. Returns when the shards are staged.

        Memory: a copy of this rank's shards, on the CPU, until they are written.
        """
        self.wait()
        unfinished = begin_checkpoint(folder, step)
        model_state, optimizer_state = states_of(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        future = dcp.async_save(state, checkpoint_id=unfinished, process_group=self._group)
        self._pending = future, folder, step

    def wait(self) -> None:
        """Wait until the checkpoint that save() has started is complete. Raises if it could not be written."""
        if self._pending is None:
            return
        (future, folder, step), self._pending = self._pending, None
        future.result()  # if one rank has failed, it raises on all ranks
        complete_checkpoint(folder, step)
