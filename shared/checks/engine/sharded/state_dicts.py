"""Compare the state dicts of two optimizers."""

import torch

from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong

_HINT_ON_DTYPES = (
    "Hint: what is the dtype of the entry, and what are the dtypes of the tensors that it is copied through?"
)
_HINT_ON_ORDER = "Hint: whose shard is it, and in which order are shards concatenated?"


def judge_state_dict(rank: int, found, expected: dict, tolerance: float, context: str) -> None:
    """Compare a saved state with what a plain optimizer saves.

    Args:
        rank: The rank.
        found: The saved state.
        expected: The plain optimizer's state_dict().
        tolerance: The tolerance of the model's values.
        context: What was tried.

    Raises:
        Wrong: If they differ.
    """
    if not isinstance(found, dict) or set(found) != set(expected):
        kind = f"a dict of {sorted(map(str, found))}" if isinstance(found, dict) else type(found).__name__
        raise Wrong({rank: f"{context}: state_dict() returned {kind}; expected a dict of {sorted(expected)}"})
    _judge_groups(rank, found["param_groups"], expected["param_groups"], context)
    trained = {index: state for index, state in expected["state"].items() if _is_trained(state)}
    if not set(trained) <= set(found["state"]) <= set(expected["state"]):
        message = f"{context}: state has entries for parameters {_keys(found['state'])}"
        hint = "Hint: which index does a parameter have in param_groups, and which parameters have state?"
        if not expected["state"]:
            hint = "Hint: what must the state be if the inner optimizer has no state yet?"
        raise Wrong({rank: f"{message}; expected entries for {_keys(expected['state'])}"}, hint)
    for index, entries in expected["state"].items():
        if index not in found["state"]:
            continue
        actual = found["state"][index]
        if set(actual) != set(entries):
            message = f"{context}: state[{index}] has {_keys(actual)}; expected {_keys(entries)}"
            raise Wrong({rank: message}, "Hint: what does the inner optimizer keep for a shard?")
        for name, value in entries.items():
            _judge_value(rank, actual[name], value, tolerance, f"{context}: state[{index}][{name!r}]")


def _is_trained(state: dict) -> bool:
    """Tell whether a parameter had a gradient. Without one, an optimizer may have no state for it."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
    return not tensors or any(value.any() for value in tensors)


def _judge_groups(rank: int, found: list[dict], reference: list[dict], context: str) -> None:
    if len(found) != len(reference):
        raise Wrong({rank: f"{context}: {len(found)} param_groups; expected {len(reference)}"})
    for index, (group, expected) in enumerate(zip(found, reference, strict=True)):
        for name in {**expected, **group}:
            if name not in group or name not in expected:
                message = "missing" if name not in group else "unexpected: a plain optimizer has no such setting"
                hint = (
                    "Hint: which settings does the inner optimizer have that the caller did not pass?"
                    if name not in group
                    else ""
                )
                raise Wrong({rank: f"{context}: param_groups[{index}][{name!r}] is {message}"}, hint)
            if not same(group[name], expected[name], 1e-12):
                message = f"is {group[name]}; expected {expected[name]}"
                hint = "Hint: which index does each parameter get?" if name == "params" else ""
                raise Wrong({rank: f"{context}: param_groups[{index}][{name!r}] {message}"}, hint)


def _judge_value(rank: int, found, expected, tolerance: float, context: str) -> None:
    if isinstance(expected, torch.Tensor) != isinstance(found, torch.Tensor):
        raise Wrong({rank: f"{context} is of type {type(found).__name__}; expected {type(expected).__name__}"})
    if not isinstance(expected, torch.Tensor):
        if found != expected:
            raise Wrong({rank: f"{context} is {found}; expected {expected}"})
        return
    if found.shape != expected.shape:
        hint = "Hint: in which shape does a plain optimizer keep it, and which slice belongs to which parameter?"
        raise Wrong({rank: f"{context} has shape {list(found.shape)}; expected {list(expected.shape)}"}, hint)
    if found.dtype != expected.dtype or not nearly_equal(found, expected, tolerance):
        kind = (
            f"has dtype {found.dtype}"
            if found.dtype != expected.dtype
            else first_difference(found, expected, tolerance)
        )
        raise Wrong({rank: f"{context}: {kind}"}, _HINT_ON_DTYPES if _rounded(found, expected) else _HINT_ON_ORDER)


def _rounded(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a tensor has another dtype than expected, or was rounded to bfloat16."""
    return found.dtype != expected.dtype or torch.equal(found, expected.bfloat16().to(expected.dtype))


def same(one, other, tolerance: float = 0.0) -> bool:
    """Return whether two values, which may be nested containers, are equal."""
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
