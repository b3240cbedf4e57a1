"""Comparing what two optimizers save."""

import torch

from shared.checks.engine.compare import close, first_difference
from shared.checks.engine.framework import Wrong

_LOOK_AT_DTYPES = "Look at: which dtype does the entry have, and which the tensors that it is copied through?"
_LOOK_AT_ORDER = "Look at: whose shard is it, and in which order are shards concatenated?"


def judge_state_dict(rank: int, found, want: dict, tolerance: float, context: str) -> None:
    """Compare a saved state with what a plain optimizer saves.

    Args:
        want: the plain optimizer's state_dict().
        tolerance: that of the model's values.

    Raises:
        Wrong: if they differ.
    """
    if not isinstance(found, dict) or set(found) != set(want):
        kind = f"a dict of {sorted(map(str, found))}" if isinstance(found, dict) else type(found).__name__
        raise Wrong({rank: f"{context}: state_dict() returned {kind}; expected a dict of {sorted(want)}"})
    _judge_groups(rank, found["param_groups"], want["param_groups"], context)
    if set(found["state"]) != set(want["state"]):
        said = f"{context}: state has entries for parameters {_keys(found['state'])}"
        hint = "Look at: which index does a parameter have in param_groups, and which parameters have state?"
        raise Wrong({rank: f"{said}; a plain optimizer's has them for {_keys(want['state'])}"}, hint)
    for number, entries in want["state"].items():
        came = found["state"][number]
        if set(came) != set(entries):
            said = f"{context}: state[{number}] has {_keys(came)}; expected {_keys(entries)}"
            raise Wrong({rank: said}, "Look at: what does the inner optimizer keep for a shard?")
        for name, value in entries.items():
            _judge_value(rank, came[name], value, tolerance, f"{context}: state[{number}][{name!r}]")


def _judge_groups(rank: int, found: list[dict], want: list[dict], context: str) -> None:
    if len(found) != len(want):
        raise Wrong({rank: f"{context}: {len(found)} param_groups; expected {len(want)}"})
    for index, (group, expected) in enumerate(zip(found, want, strict=True)):
        for name in {**expected, **group}:
            if name not in group or name not in expected:
                said = "missing" if name not in group else "there, but a plain optimizer has no such setting"
                hint = (
                    "Look at: which settings does the inner optimizer have that the caller did not give?"
                    if name not in group
                    else ""
                )
                raise Wrong({rank: f"{context}: param_groups[{index}][{name!r}] is {said}"}, hint)
            if not same(group[name], expected[name], 1e-12):
                said = f"is {group[name]}; expected {expected[name]}"
                hint = "Look at: which index does each parameter get?" if name == "params" else ""
                raise Wrong({rank: f"{context}: param_groups[{index}][{name!r}] {said}"}, hint)


def _judge_value(rank: int, found, want, tolerance: float, said: str) -> None:
    if isinstance(want, torch.Tensor) != isinstance(found, torch.Tensor):
        raise Wrong({rank: f"{said} is of type {type(found).__name__}; expected {type(want).__name__}"})
    if not isinstance(want, torch.Tensor):
        if found != want:
            raise Wrong({rank: f"{said} is {found}; expected {want}"})
        return
    if found.shape != want.shape:
        hint = "Look at: in which shape does a plain optimizer keep it, and which slice belongs to which parameter?"
        raise Wrong({rank: f"{said} has shape {list(found.shape)}; expected {list(want.shape)}"}, hint)
    if found.dtype != want.dtype or not close(found, want, tolerance):
        kind = f"has dtype {found.dtype}" if found.dtype != want.dtype else first_difference(found, want, tolerance)
        raise Wrong({rank: f"{said}: {kind}"}, _LOOK_AT_DTYPES if _rounded(found, want) else _LOOK_AT_ORDER)


def _rounded(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Tell whether it is in another dtype, or was rounded to one."""
    return found.dtype != want.dtype or torch.equal(found, want.bfloat16().to(want.dtype))


def same(one, other, tolerance: float = 0.0) -> bool:
    """Tell whether two values are equal, whatever containers they are made of."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair, tolerance) for pair in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is float and type(other) is float:
        return abs(one - other) <= tolerance
    return one == other


def _keys(entries) -> str:
    return ", ".join(map(str, entries)) or "nothing"
