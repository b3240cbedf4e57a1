"""Which tokens each rank has, and how a check cuts and compares whole sequences."""

import torch

from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong


def chunks_of(index: int, size: int, balanced: bool) -> list[int]:
    """Return the numbers of a rank's chunks, of 2N chunks in zigzag order if balanced, else of N."""
    return [index, 2 * size - 1 - index] if balanced else [index]


def tokens_of(index: int, size: int, balanced: bool, length: int) -> list[int]:
    """Return the positions of a rank's tokens in the whole sequence."""
    chunk = length // (2 * size if balanced else size)
    return [chunk * number + token for number in chunks_of(index, size, balanced) for token in range(chunk)]


def shard(whole: torch.Tensor, dim: int, index: int, size: int, balanced: bool) -> torch.Tensor:
    tokens = tokens_of(index, size, balanced, whole.shape[dim])
    return whole.index_select(dim, torch.tensor(tokens)).clone()


def order_name(balanced: bool) -> str:
    return "balanced" if balanced else "not balanced"


def judge(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor], what: str, hint, tolerance=1e-10) -> None:
    """Compare a tensor of each rank with what it should be.

    Args:
        found: The tensors, by global rank.
        expected: What they should be.
        what: What they are.
        hint: A function of a rank and its tensor that returns a hint.
        tolerance: Relative to the largest value.

    Raises:
        Wrong: If one differs.
    """
    wrong, hints = {}, []
    for rank, tensor in found.items():
        right = expected[rank]
        if not isinstance(tensor, torch.Tensor):
            raise Wrong({rank: f"{what}: expected a tensor, got {type(tensor).__name__}"})
        if tensor.shape != right.shape:
            wrong[rank] = f"{what} has the shape {list(tensor.shape)}, expected {list(right.shape)}"
        elif tensor.isnan().any():
            wrong[rank] = f"{what}: element {int(tensor.isnan().flatten().nonzero()[0])} is nan"
        elif not nearly_equal(tensor, right, tolerance):
            wrong[rank] = f"{what}: {first_difference(tensor, right, tolerance)}"
        else:
            continue
        hints.append(hint(rank, tensor))
    if wrong:
        raise Wrong(wrong, next((each for each in hints if each), ""))
