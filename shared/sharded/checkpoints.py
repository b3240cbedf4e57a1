"""States for a checkpoint: read without changing anything, and fitted to what a checkpoint has."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict

from shared.sharded.states import OwnShards


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    """Return the states of a model and an optimizer, without changing the optimizer or the gradients.

    get_state_dict() lets an optimizer without state step with gradients of zero, so that its step counts begin at 1.
    """
    _expect_whole(model, optimizer)
    had_state = bool(optimizer.state)
    with gradients_aside(optimizer):
        model_state, optimizer_state = get_state_dict(model, optimizer)
    if not had_state:
        optimizer.state.clear()
        optimizer_state["state"] = {}
    return model_state, optimizer_state


@contextlib.contextmanager
def states_to_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict, dict]]:
    """Yield a state of the model and one of the optimizer, with exactly what a checkpoint has.

    A parameter that never had a gradient has no state in the checkpoint. A learning rate scheduler adds settings to
    the optimizer's groups: those that the checkpoint lacks are kept.

    Raises:
        ValueError: if the checkpoint belongs to another model or optimizer.
    """
    _expect_whole(model, optimizer)
    saved = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    with gradients_aside(optimizer):
        optimizer.state.clear()  # get_state_dict() then creates a state for every trained parameter
        model_state, optimizer_state = get_state_dict(model, optimizer)
        _expect_same_model(saved, model_state)
        _keep_saved_states(saved, optimizer_state["state"])  # pyright: ignore[reportArgumentType] (torch's union is wider)
        groups: Any = optimizer_state["param_groups"]
        new_settings = [
            _keep_saved_settings(saved, f"optimizer.param_groups.{index}.", group, optimizer.defaults)
            for index, group in enumerate(groups)
        ]
        yield model_state, optimizer_state
        for group, new in zip(optimizer.param_groups, new_settings, strict=True):
            group |= new


def _expect_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError for shards that get_state_dict() does not know: it would leave out what other ranks have."""
    if (
        sharded := next((type(part).__name__ for part in model.modules() if isinstance(part, OwnShards)), None)
    ) is not None:
        raise ValueError(f"a {sharded} model has a state of its own: save and load its full_state_dict()")
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise ValueError(
            f"the state of a {type(optimizer).__name__} is in shards of its own: save optimizer.state_dict(), which "
            "gathers them, and load it with load_state_dict()"
        )


@contextlib.contextmanager
def gradients_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Remove all gradients for a while, because get_state_dict() creates no state for an optimizer that has some."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _expect_same_model(saved: set[str], model_state: dict) -> None:
    own = flatten_state_dict({"model": model_state})[0]
    strangers = [name for name in saved - own.keys() if name.startswith("model.") and "_extra_state" not in name]
    if strangers:
        raise ValueError(f"this checkpoint belongs to another model, which also has {sorted(strangers)}")


def _keep_saved_states(saved: set[str], states: dict[str, dict]) -> None:
    """Remove the states of parameters that had no gradient before the checkpoint."""
    known = {f"optimizer.state.{name}.{entry}": name for name, entries in states.items() for entry in entries}
    if others := sorted(name for name in saved - known.keys() if name.startswith("optimizer.state.")):
        raise ValueError(
            f"this checkpoint has {others}, but the optimizer is another one, or the parameter is frozen: "
            "unfreeze it, load, and freeze it again"
        )
    with_state = {known[name] for name in saved & known.keys()}
    for name in states.keys() - with_state:
        del states[name]


def _keep_saved_settings(saved: set[str], prefix: str, group: dict, defaults: dict) -> dict:
    """Let a group have the settings that the checkpoint has. Returns those that it lacks, such as a new scheduler's."""
    names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
    new = {key: group.pop(key) for key in group.keys() - names - defaults.keys() - {"params"}}
    group |= dict.fromkeys(names - group.keys())  # such as initial_lr: loading replaces the None
    return new
