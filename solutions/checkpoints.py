# Built by `make notebooks` from source/12_checkpoints/lab.py: edit that, not this.
"""Sharded checkpoints that no crash can corrupt, and that any number of ranks can load."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the largest step, or None if there is none."""
    suffixes = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    steps = {path: int(suffix) for path, suffix in suffixes.items() if suffix.isdigit()}
    return max(steps, key=steps.get, default=None)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    """Return the states of a model and an optimizer, without changing the optimizer or the gradients."""
    had_state, gradients = bool(optimizer.state), set_gradients_aside(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if not had_state:
        optimizer.state.clear()
        optimizer_state["state"] = {}
    restore_gradients(gradients)
    return model_state, optimizer_state


def set_gradients_aside(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Remove and return all gradients, because get_state_dict() creates no state for an optimizer that has some."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def restore_gradients(gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


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


def expected_in(saved: Iterable[str], model_state: dict, optimizer_state: dict, defaults: dict) -> list[dict]:
    """Fit states to the names that a checkpoint has, in place.

    Returns:
        The settings of each group that the checkpoint lacks, such as those of a scheduler that is new.

    Raises:
        ValueError: if the checkpoint belongs to another model.
    """
    saved = set(saved)
    own = flatten_state_dict({"model": model_state})[0]
    strangers = {name for name in saved - own.keys() if name.startswith("model.") and "_extra_state" not in name}
    if strangers:
        raise ValueError(f"this checkpoint belongs to another model, which also has {sorted(strangers)}")
    states, groups = optimizer_state["state"], optimizer_state["param_groups"]
    known = {f"optimizer.state.{name}.{entry}" for name, entries in states.items() for entry in entries}
    frozen = {name for name in saved - known if name.startswith("optimizer.state.")}
    if frozen:
        raise ValueError(
            f"this checkpoint has {sorted(frozen)}, but the optimizer is another one, or the parameter is frozen: "
            "unfreeze it, load, and freeze it again"
        )
    for name in [name for name in states if not any(f"optimizer.state.{name}.{key}" in saved for key in states[name])]:
        del states[name]  # this parameter had no gradient before the checkpoint
    new_settings = []
    for index, group in enumerate(groups):
        prefix = f"optimizer.param_groups.{index}."
        names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
        new = {key: group.pop(key) for key in group.keys() - names - defaults.keys() - {"params"}}
        new_settings.append(new)
        group |= dict.fromkeys(names - group.keys())  # such as initial_lr: loading replaces the None
    return new_settings


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, which any number of ranks may have written. Returns its step."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    gradients = set_gradients_aside(optimizer)
    optimizer.state.clear()  # get_state_dict() then creates a state for every trained parameter
    model_state, optimizer_state = get_state_dict(model, optimizer)
    new_settings = expected_in(saved, model_state, optimizer_state, optimizer.defaults)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)  # fills the tensors in place and replaces the step
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # some parameters may have no state
    )
    for group, new in zip(optimizer.param_groups, new_settings, strict=True):
        group |= new
    restore_gradients(gradients)
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
