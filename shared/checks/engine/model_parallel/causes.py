"""Recognize common mistakes in a split model by the values that they produce."""

import torch

from shared.checks.engine.compare import nearly_equal
from shared.checks.engine.model_parallel.probe import Held

HINT_ON_GRAPH = "Hint: on this rank, does the autograd graph lead from the loss back to this tensor?"
_IN_FLOAT32 = 1e-5


def of_an_output(
    found: torch.Tensor,
    expected: torch.Tensor,
    every: list[torch.Tensor],
    state: dict[str, torch.Tensor],
    otherwise: str,
) -> str:
    """Return a hint on a wrong output.

    Args:
        found: The output of one rank.
        expected: What it should be.
        every: The outputs of all ranks that saw the same samples.
        state: The parameters that one process computes with.
        otherwise: The hint if nothing is recognized.
    """
    size = len(every)
    if found.shape != expected.shape:
        return "Hint: along which dimension are the ranks' outputs concatenated?"
    if size > 1 and nearly_equal(found * size, expected):
        return f"It is exactly {size} times too small. Hint: are partial sums added or averaged?"
    if size > 1 and _add_up_to(every, expected):
        return "The ranks' outputs add up to the right one. Hint: which line adds them up, and when does it run?"
    if nearly_equal(found.flatten().sort().values, expected.flatten().sort().values):
        return "These are the right elements in another order. Hint: which rank holds which indices?"
    difference = found - expected
    for name, parameter in state.items():
        is_bias = size > 1 and parameter.shape == expected.shape[-1:]
        if is_bias and nearly_equal(difference, ((size - 1) * parameter).expand_as(expected)):
            return f"{name} is in the output {size} times. Hint: on how many ranks is it added before the sum?"
    if nearly_equal(found, expected, _IN_FLOAT32):
        return "It is close, but not as precise as float64. Hint: is anything computed or sent in float32?"
    return otherwise


def of_a_gradient(
    found: torch.Tensor, expected: torch.Tensor, every: list[torch.Tensor | None], size: int, otherwise: str
) -> str:
    """Return a hint on a wrong gradient.

    Args:
        found: The gradient on one rank.
        expected: What it should be.
        every: This gradient on all ranks that hold the whole of it.
        size: The number of ranks in the group.
        otherwise: The hint if nothing is recognized.
    """
    if found.shape != expected.shape:
        return ""
    if not found.isfinite().all():
        return "It is not finite. Hint: which of your tensors must be a constant for autograd?"
    if size > 1 and nearly_equal(found, expected * size):
        return f"It is exactly {size} times too large. Hint: on how many ranks is it complete before you add it up?"
    if size > 1 and nearly_equal(found * size, expected):
        return f"It is exactly {size} times too small. Hint: is it a sum over the ranks or a mean?"
    if len(every) > 1 and _add_up_to(every, expected):
        return "Each rank has a part of it, and the sum of the parts is right. Hint: which line adds them up?"
    if not found.any():
        return "It is all zeros. Hint: on every rank, does the autograd graph lead from the loss back to it?"
    if nearly_equal(found, expected, _IN_FLOAT32):
        return "It is close, but not as precise as float64. Hint: is anything computed or sent in float32?"
    return otherwise


def of_a_shard(held: Held, whole: torch.Tensor) -> str:
    """Return a hint on a shard whose values are wrong."""
    if held.shard.dim is not None and held.shard.tensor.shape == whole.shape:
        return "It has the shape of the whole parameter. Hint: which part of it belongs to this rank?"
    return "Hint: which indices of the whole parameter belong to this rank?"


def _add_up_to(parts: list[torch.Tensor | None], expected: torch.Tensor) -> bool:
    alike = [part for part in parts if part is not None and part.shape == expected.shape]
    return len(alike) == len(parts) and nearly_equal(sum(alike), expected)
