# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""Optimizer state: from this rank's shards to full tensors per parameter, and back."""

import torch
from torch import nn

from solutions.collectives import gather_shards
from solutions.flat import FlatLayout


def gather_state(layout: FlatLayout, shard_entries: dict, to: int | None = None) -> dict[nn.Parameter, dict]:
    """Turn the optimizer state of one shard into the state of each parameter. All ranks must call this.

    Entries of the shard's shape, such as Adam's exp_avg, are gathered and split. All others, such as Adam's step, are
    shared by the parameters: each gets a copy.

    Args:
        shard_entries: the inner optimizer's state of the shard.
        to: the group rank that gets the gathered entries, or None for all ranks.

    Communication: one gather, or all-gather, per sharded entry.
    """
    states = {parameter: {} for parameter in layout.parameters} if shard_entries else {}
    for name, value in shard_entries.items():
        if not torch.is_tensor(value):
            values = [value] * len(layout.parameters)
        elif value.shape != layout.shard_shape:
            values = [value.clone() for _ in layout.parameters]
        else:
            flat = gather_shards(value, layout.group, to)
            if flat is None:
                continue
            values = layout.views(flat)
        for parameter, parameter_value in zip(layout.parameters, values, strict=True):
            states[parameter][name] = parameter_value
    return states


def shard_state(layout: FlatLayout, entries_of: list[dict]) -> dict:
    """Keep this rank's shard of the parameters' states: the reverse of gather_state().

    Args:
        entries_of: the state of each of the layout's parameters, in order. Some may lack entries: a plain optimizer has
            no state for a parameter that never had a gradient.

    Raises:
        ValueError: if the state belongs to other parameters.
    """
    names = dict.fromkeys(name for entries in entries_of for name in entries)
    return {name: shard_entry(layout, name, [entries.get(name) for entries in entries_of]) for name in names}


def is_per_element(name: str, values: list, parameters: list[nn.Parameter]) -> bool:
    """Tell whether an entry has a value for each element of a parameter, such as exp_avg, or is shared, such as step.

    Args:
        values: the entry of each parameter, or None for a parameter that lacks it.

    Raises:
        ValueError: if the entry has another shape than its parameter, but is no scalar.
    """
    known = [pair for pair in zip(values, parameters, strict=True) if pair[0] is not None]
    if name == "step" or not known:  # a scalar parameter has the same shape as its step
        return False
    mismatched = [(value, parameter) for value, parameter in known if getattr(value, "shape", None) != parameter.shape]
    if not mismatched:
        return True
    if not any(getattr(value, "ndim", 0) for value, _ in known):
        return False
    value, parameter = mismatched[0]
    raise ValueError(
        f"this state belongs to other parameters: {name} has shape {list(getattr(value, 'shape', []))}, "
        f"but its parameter has shape {list(parameter.shape)}"
    )


def new_entry(layout: FlatLayout, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a flat tensor for one entry of the state, with the values for parameters that lack the entry.

    These are zeros. The exception is master weights (lab 06): a parameter that was never updated is its own master.
    """
    flat = layout.new_flat(torch.promote_types(dtype, layout.parameters[0].dtype))
    if name == "master":
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(parameter.detach())
    return flat


def shard_entry(layout: FlatLayout, name: str, values: list):
    """Keep this rank's shard of one entry of the parameters' states, or a copy of one that they share.

    Args:
        values: the entry of each of the layout's parameters, or None for a parameter that lacks it.
    """
    known = next((value for value in values if value is not None), None)
    if not is_per_element(name, values, layout.parameters):
        return known.clone() if torch.is_tensor(known) else known
    flat = new_entry(layout, name, known.dtype)
    for view, value in zip(layout.views(flat), values, strict=True):
        if value is not None:
            view.copy_(value)
    return layout.shard_of(flat).clone()  # a view would keep all of flat alive
