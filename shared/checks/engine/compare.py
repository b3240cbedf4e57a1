"""Compare what ranks compute with what one process computes, and guess the cause of a difference from its pattern."""

from collections.abc import Iterable, Iterator

import torch

from shared.checks.engine.failures import Wrong
from shared.checks.models import awkward
from shared.ranks.diagnosis import name_ranks

# Both sides add the same few dozen float64 values in different orders. Each addition may round by 1.1e-16 of its size,
# so an error of 1e-10 of the largest value is thousands of times larger than rounding errors.
RELATIVE_TOLERANCE = 1e-10

MOST_DIVISOR = 16  # a mean that was divided by a wrong number is recognized up to this number

_OWN_VALUE = "It is still this rank's own value. Hint: where is the result of the collective stored?"


def total_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of at least one tensor."""
    first, *others = tensors
    return sum(others, first + 0)


def describe_calls(calls: list) -> str:
    """Summarize calls: `3 messages (all_reduce), 96 bytes`."""
    if not calls:
        return "no message"
    kinds = ", ".join(sorted({call.op for call in calls}))
    total_bytes = sum(call.payload_bytes for call in calls)
    return f"{len(calls)} message{'s' if len(calls) != 1 else ''} ({kinds}), {total_bytes} bytes"


def tolerance_of(tensors) -> float:
    """Return the tolerance for a model: 1e-5 if any of it is float32, more than a hundred rounding errors of 6e-8.

    Args:
        tensors: All of the model's tensors. One float32 parameter rounds the values from which the gradients of all
            others are computed.
    """
    in_float32 = any(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)
    return 1e-5 if in_float32 else RELATIVE_TOLERANCE


def nearly_equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    if expected.dtype == torch.bool:  # a buffer
        return torch.equal(found, expected)
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    return found.shape == expected.shape and bool(
        ((found.double() - expected.double()).abs() <= tolerance * scale).all()
    )


def first_difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float = RELATIVE_TOLERANCE) -> str:
    """Describe the first difference between two tensors: `element 13 is 0.0, expected −0.41`."""
    if found.shape != expected.shape:
        return f"the shape is {list(found.shape)}, expected {list(expected.shape)}"
    scale = max(1.0, expected.double().abs().max().item())
    off = (found.double() - expected.double()).abs().flatten() > tolerance * scale
    if not off.any() and found.isfinite().all():
        return "equal"
    index = int(off.nonzero()[0]) if off.any() else int((~found.isfinite()).flatten().nonzero()[0])
    value, expected_value = found.flatten()[index].item(), expected.flatten()[index].item()
    if f"{value:.6g}" == f"{expected_value:.6g}":
        return f"element {index} differs from {expected_value:.6g} by {abs(value - expected_value):.0e}"
    return f"element {index} is {value:.6g}, expected {expected_value:.6g}"


def cause_of(found: torch.Tensor, mistakes: Iterable[tuple[torch.Tensor, str]], otherwise: str = "") -> str:
    """Return the hint of the first mistake that gives the values found.

    Args:
        found: The values found.
        mistakes: What each mistake would give, and its hint.
        otherwise: The hint for values that no mistake explains.
    """
    return next((hint for value, hint in mistakes if nearly_equal(found, value)), otherwise)


def mistakes_in_a_mean(mean: torch.Tensor, index: int, own: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield what mistakes give instead of a shard of the mean over the ranks, with a hint for each.

    Args:
        mean: The shards of the mean, as rows.
        index: The shard that is expected.
        own: The shards of this rank's own values.
    """
    size, expected = len(mean), mean[index]
    if size > 1 and expected.any():
        yield expected * size, f"It is exactly {size} times too large. Hint: is it the sum or the mean?"
        yield expected / size, f"It is exactly {size} times too small. Hint: how many times is it divided?"
    if expected.count_nonzero() > 1:  # a single element is a multiple of any other
        for divisor in range(2, MOST_DIVISOR + 1):
            hint = f"It is the sum over {size} ranks, divided by {divisor}. Hint: over how many ranks is the mean?"
            yield expected * size / divisor, hint
    for rank, other in enumerate(mean):
        yield other, f"It is the shard of the group's rank {rank}. Hint: which shard belongs to which rank?"
    yield own[index], "It is this rank's own gradient. Hint: which tensor holds the sum?"


def judge_gradients(found: dict[int, dict], reference: dict, local: dict[int, dict], context: str) -> None:
    """Compare every rank's gradients with those of one process, and hint at the likely cause of a difference.

    Args:
        found: The gradients after synchronization, by global rank.
        reference: The gradients of one process.
        local: The gradients of each rank's own samples, by global rank.
        context: What was tried.

    Raises:
        Wrong: If a gradient differs.
    """
    wrong, hints, tolerance = {}, [], tolerance_of(reference.values())
    for rank, gradients in found.items():
        for name, expected in reference.items():
            complaint = _complaint(gradients[name], expected, tolerance)
            if complaint:
                wrong[rank] = f"{context}: {name}{complaint}"
                every = {other: gradients_of[name] for other, gradients_of in local.items()}
                hint = _cause(gradients[name], expected, rank, every)
                if hint == _OWN_VALUE and _some_averaged(gradients, reference, local[rank], tolerance):
                    hint = (
                        "It is still this rank's own gradient, while others are averaged. "
                        "Hint: which message contains this gradient?"
                    )
                hints.append(hint)
                break
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _some_averaged(found: dict, expected: dict, own: dict, tolerance: float) -> bool:
    """Return whether any gradient is the mean over the ranks, and differs from this rank's own."""
    pairs = [(found[name], expected[name], own[name]) for name in expected]
    tensors = [each for each in pairs if not any(tensor is None for tensor in each)]
    return any(
        nearly_equal(was, mean, tolerance) and not nearly_equal(alone, mean, tolerance) for was, mean, alone in tensors
    )


def _complaint(found, expected, tolerance: float) -> str:
    """Say what is wrong with a gradient, in words that follow the parameter's name, or return ""."""
    if expected is None:  # no rank uses the parameter: its gradient may be None or zeros
        return "" if found is None or not found.any() else " has a gradient that is not zero, but no sample uses it"
    if found is None:
        return " has the gradient None" if expected.any() else ""
    return "" if nearly_equal(found, expected, tolerance) else f", {first_difference(found, expected, tolerance)}"


def _cause(found, expected, rank: int, every: dict) -> str:
    """Recognize common mistakes from the values.

    Args:
        found: The gradient after synchronization.
        expected: The mean over the ranks.
        every: The gradient of each rank's own samples, by rank.
    """
    world_size, own = len(every), every[rank]
    missing = [other for other, theirs in every.items() if theirs is None]
    if expected is None:
        return "Hint: what do you store in a .grad that is None?"
    if found is None:
        if len(missing) == world_size:
            return "After backward(), it was None on all ranks. Hint: which module does forward() run?"
        if own is None:
            return "Hint: what happens to a parameter whose grad is None on this rank, but not on another one?"
        return "Hint: what happened to the .grad that backward() computed?"
    if found.shape != expected.shape:
        return ""
    if world_size == 1:
        return "The mean over a single rank is that rank's own value. Hint: which line changes it?"
    if 0 < len(missing) < world_size and nearly_equal(found, expected * (world_size / (world_size - len(missing)))):
        return f"Before, it was None on {name_ranks(missing)}. Hint: over how many ranks is the mean?"
    if nearly_equal(found, expected * world_size):
        return (
            f"It is exactly {world_size} times too large. "
            "Hint: is it summed or averaged? And do you divide it in place?"
        )
    if nearly_equal(found, expected / world_size):
        return f"It is exactly {world_size} times too small. Hint: how many times do you divide it?"
    if own is not None and nearly_equal(found, own):
        return _OWN_VALUE
    if own is not None and nearly_equal(found, own / world_size):
        return (
            "It is this rank's own gradient divided by the world size. "
            "Hint: which tensor is sent, and is .grad the tensor that holds the result? "
            "And is that all-reduce complete when you return?"
        )
    for other, theirs in every.items():
        if theirs is not None and nearly_equal(found, theirs):
            return f"It is rank {other}'s gradient, not the mean over the ranks."
    if nearly_equal(found, expected, 1e-5):
        return "It is close, but not as precise as float64. Hint: is anything converted to float32?"
    if found.numel() > 1:  # a single element is a multiple of any other
        for divisor in range(2, MOST_DIVISOR + 1):
            if divisor != world_size and nearly_equal(found, expected * world_size / divisor):
                counted = f"the sum over {world_size} ranks, divided by {divisor}"
                return f"It is {counted}. Hint: over how many ranks is the mean?"
        largest = expected.abs().argmax()
        factor = (found.flatten()[largest] / expected.flatten()[largest]).item()
        if factor and nearly_equal(found, expected * factor):
            return f"It is {factor:.4g} times what it should be. Hint: which number do you multiply or divide it by?"
    if not found.any():
        return "It is all zeros. Hint: was the gradient overwritten, or was it never filled in?"
    if missing:
        return f"This gradient is None on rank {missing[0]}. Hint: what does that rank send for it?"
    return "Hint: which tensor is sent, and what happens to the result?"


def judge_state(states: dict[int, dict], reference: dict, source: int, before: dict[int, dict] | None = None) -> None:
    """Compare the bits of every rank's parameters and buffers with those of the source rank.

    Args:
        states: The parameters and buffers, by global rank.
        reference: Those of the source rank.
        source: The source rank.
        before: What each rank had before it got these values, if this can explain a difference.

    Raises:
        Wrong: If a tensor differs.
    """
    wrong, hints, own = {}, {}, before or {}
    for rank, state in states.items():
        for name, expected in reference.items():
            if not torch.equal(state[name], expected):
                wrong[rank] = f"{name}: {first_difference(state[name].double(), expected.double(), 0.0)}"
                is_own = rank in own and torch.equal(state[name], own[rank][name])
                hints[name] = _HINTS_ON_STATE.get(name, _OWN_STATE if is_own else "")
                break
    if wrong:
        raise Wrong(
            wrong,
            f"Every rank must have the values of rank {source}, the group's first rank. {hints[min(hints)]}".strip(),
        )


_OWN_STATE = "It is still this rank's own value. Hint: is it broadcast, and into which tensor does the broadcast write?"
_HINTS_ON_STATE = {  # by the name of the first wrong tensor, which shows what was left out
    "first.bias": "This parameter is frozen. Hint: does forward use frozen parameters?",
    "scale": "This is a buffer. Hint: what does a module hold besides parameters?",
    "shift": "This is a buffer that state_dict() leaves out. Hint: which method of a module lists all buffers?",
}


def reject_frozen_gradients(frozen: dict[int, list[str]], model: str) -> None:
    """Check that no frozen parameter has a gradient.

    Args:
        frozen: The frozen parameters that have one, by global rank.
        model: The name of the model.

    Raises:
        Wrong: If one has.
    """
    wrong = {
        rank: f"{awkward.describe(model)}: {names[0]} is frozen, but its .grad is not None"
        for rank, names in frozen.items()
        if names
    }
    if wrong:
        raise Wrong(wrong, "Hint: what would weight decay do to a frozen parameter whose .grad is zeros?")
