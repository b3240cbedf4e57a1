"""Comparing what ranks computed with what one process did, and guessing the cause from the pattern."""

import torch

from shared.checks.engine.framework import Wrong
from shared.checks.models import awkward

# Both sides add the same few dozen float64 numbers, in another order: each addition may round by
# 1.1e-16 of its size, so 1e-10 of the largest value is thousands of roundings away.
RELATIVE_TOLERANCE = 1e-10

_NOTHING_OF_OTHERS = "It is what this rank had before: nothing of the others' is in it. Hint: where is the result put?"


def describe_calls(calls: list) -> str:
    """Sum up messages: `3 messages (all_reduce), 96 bytes`."""
    if not calls:
        return "no message"
    kinds = ", ".join(sorted({call.op for call in calls}))
    total_bytes = sum(call.payload_bytes for call in calls)
    return f"{len(calls)} message{'s' if len(calls) != 1 else ''} ({kinds}), {total_bytes} bytes"


def tolerance_of(tensors) -> float:
    """float32 rounds at 6e-8 of a number's size: 1e-5 is a hundred roundings away.

    tensors: all of a model's, because one float32 parameter rounds what the others' gradients are computed from.
    """
    in_float32 = any(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)
    return 1e-5 if in_float32 else RELATIVE_TOLERANCE


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    if expected.dtype == torch.bool:  # a buffer
        return torch.equal(found, expected)
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    return found.shape == expected.shape and bool(
        ((found.double() - expected.double()).abs() <= tolerance * scale).all()
    )


def first_difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float = RELATIVE_TOLERANCE) -> str:
    """Say where two tensors differ first: `element 13 is 0.0, expected −0.41`."""
    if found.shape != expected.shape:
        return f"the shape is {list(found.shape)}, expected {list(expected.shape)}"
    scale = max(1.0, expected.double().abs().max().item())
    off = (found.double() - expected.double()).abs().flatten() > tolerance * scale
    if not off.any() and found.isfinite().all():
        return "equal"
    index = int(off.nonzero()[0]) if off.any() else int((~found.isfinite()).flatten().nonzero()[0])
    was, wanted = found.flatten()[index].item(), expected.flatten()[index].item()
    if f"{was:.6g}" == f"{wanted:.6g}":
        return f"element {index} is {wanted:.6g}, but off by {abs(was - wanted):.0e}"
    return f"element {index} is {was:.6g}, expected {wanted:.6g}"


def by_rank(found: list[dict], what: str, members: list[int] | None = None) -> dict[int, dict]:
    return {rank: found[rank][what] for rank in members or range(len(found))}


def judge_gradients(found: dict[int, dict], reference: dict, local: dict[int, dict], context: str) -> None:
    """Compare every rank's gradients with one process's; name the likely cause where the values betray it.

    found: by global rank, after synchronization; local: by global rank, what its own samples alone give.
    Raises: Wrong.
    """
    wrong, hints, tolerance = {}, [], tolerance_of(reference.values())
    for rank, gradients in found.items():
        for name, expected in reference.items():
            complaint = _complaint(gradients[name], expected, tolerance)
            if complaint:
                wrong[rank] = f"{context}: {name}, {complaint}"
                every = {other: gradients_of[name] for other, gradients_of in local.items()}
                hint = _cause(gradients[name], expected, rank, every)
                if hint == _NOTHING_OF_OTHERS and _some_averaged(gradients, reference, local[rank], tolerance):
                    hint = "It is what this rank had before; others are the mean. Hint: in which message is this one?"
                hints.append(hint)
                break
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _some_averaged(found: dict, expected: dict, own: dict, tolerance: float) -> bool:
    """Is any gradient the mean over the ranks, which this rank could not have by itself?"""
    pairs = [(found[name], expected[name], own[name]) for name in expected]
    tensors = [each for each in pairs if not any(tensor is None for tensor in each)]
    return any(close(was, mean, tolerance) and not close(alone, mean, tolerance) for was, mean, alone in tensors)


def _complaint(found, expected, tolerance: float) -> str:
    if expected is None:  # unused everywhere: None, or the zeros that its None counts as
        return "" if found is None or not found.any() else "no sample uses it, and still it is not zero"
    if found is None:
        return "is None" if expected.any() else ""
    return "" if close(found, expected, tolerance) else first_difference(found, expected, tolerance)


def _cause(found, expected, rank: int, every: dict) -> str:
    """Recognize the usual mistakes by their values. every: by rank, what it had before."""
    world_size, own = len(every), every[rank]
    if found is None or expected is None:
        if own is None and any(theirs is not None for theirs in every.values()):
            return "Hint: what happens to a parameter whose grad is None on this rank, but not on another?"
        return "Hint: what became of the .grad that backward() left?"
    if found.shape != expected.shape:
        return ""
    if world_size == 1:
        return "On one rank the mean is what backward() left. Hint: what changes it?"
    if close(found, expected * world_size):
        return f"It is exactly {world_size} times too large. Hint: summed, or averaged? And in place?"
    if close(found, expected / world_size):
        return f"It is exactly {world_size} times too small. Hint: how often is it divided?"
    if own is not None and close(found, own):
        return _NOTHING_OF_OTHERS
    if own is not None and close(found, own / world_size):
        return "It is what this rank had, divided, and nothing of the others'. Hint: which tensor was sent?"
    for other, theirs in every.items():
        if theirs is not None and close(found, theirs):
            return f"It is what rank {other} had, not the mean over the ranks."
    if close(found, expected, 1e-5):
        return "It is close, but float64 could be closer. Hint: does a float32 come in?"
    if not found.any():
        return "It is all zeros. Hint: was it overwritten, or never filled?"
    return "Hint: which tensor is sent, and what is done with what arrives?"


def judge_state(states: dict[int, dict], reference: dict, source: int) -> None:
    """Compare every rank's parameters and buffers, by global rank, bit by bit with the source's.

    Raises: Wrong.
    """
    wrong, names = {}, set()
    for rank, state in states.items():
        for name, expected in reference.items():
            if not torch.equal(state[name], expected):
                wrong[rank] = f"{name}: {first_difference(state[name].double(), expected.double(), 0.0)}"
                names.add(name)
                break
    if wrong:
        raise Wrong(
            wrong, f"Expected: what rank {source}, the group's first, had. {_HINTS_ON_STATE.get(min(names), '')}"
        )


_HINTS_ON_STATE = {  # by the first tensor that is wrong, where that betrays what was left out
    "first.bias": "This parameter is frozen. Hint: does a forward use it?",
    "scale": "This is a buffer. Hint: what else than parameters does a module hold?",
    "shift": "This is a buffer that state_dict() leaves out. Hint: where does a module list all of them?",
}


def refuse_frozen_gradients(found: dict[int, dict], model: str) -> None:
    """Raises: Wrong where a frozen parameter has got a gradient."""
    wrong = {
        rank: f"{awkward.said(model)}: {result['frozen'][0]} is frozen and has a .grad now, not None"
        for rank, result in found.items()
        if result["frozen"]
    }
    if wrong:
        raise Wrong(wrong, "Hint: what would weight decay do to it?")
