"""Check the numbers that the first collectives return, and recognize common mistakes from a wrong result."""

import torch

from shared.checks.engine.failures import Wrong

FLOAT32_TOLERANCE = 1e-6  # float32 has about 7 digits, so the error of a few additions is smaller than this


def judge_numbers(found: list[tuple[str, object]], expected: float, tolerance: float, cause_of) -> None:
    """Check that every rank's result is a float within the tolerance.

    Args:
        found: The type and the value of each rank's result.
        expected: The expected value.
        tolerance: The relative tolerance.
        cause_of: Returns a hint for a rank and its wrong value.

    Raises:
        Wrong: If a result is not.
    """
    wrong, hints = {}, []
    for rank, (kind, value) in enumerate(found):
        if kind != "float":
            wrong[rank] = f"returned {with_article(kind)}; expected a float"
            hints.append("Hint: what does tensor.item() do?" if kind == "Tensor" else "")
        elif not abs(value - expected) <= tolerance * max(1.0, abs(expected)):
            wrong[rank] = "returned {}, expected {}".format(*_distinguishable(value, expected))
            hints.append(cause_of(rank, value))
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _distinguishable(found: float, expected: float) -> tuple[str, str]:
    """Format two numbers with 6 digits, or with all digits if they would look the same."""
    short = f"{found:.6g}", f"{expected:.6g}"
    return short if short[0] != short[1] else (repr(found), repr(expected))


def with_article(kind: str) -> str:
    return "None" if kind == "NoneType" else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def is_close(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-9 * max(1.0, abs(other))


def common_cause(value: float, own: float, every: list[float]) -> str:
    """Recognize common mistakes in a number that should be the sum or a mean over the ranks."""
    if len(every) == 1:
        return ""
    if value == own:
        return "It is this rank's own value. Hint: which tensor holds the result of the collective?"
    if value == max(every):
        return "It is the largest of all ranks' values. Hint: which reduce operation does the collective use?"
    if value in every:
        return f"It is rank {every.index(value)}'s value. Hint: what do the other ranks contribute?"
    if is_close(value, own * len(every)):
        return f"It is {len(every)} times this rank's own value. Hint: what do the other ranks contribute?"
    return ""


def mean_cause(own: list[torch.Tensor], rank: int, value: float) -> str:
    everything, mine = torch.cat(own), own[rank]
    total, means = everything.sum().item(), [values.mean().item() for values in own if len(values)]
    shares = f"The ranks hold {', '.join(str(len(values)) for values in own)} values. "
    if value != value:
        return shares + "The mean of no values is nan. Hint: what should a rank send if it holds no values?"
    if is_close(value, sum(means) / len(means)) or is_close(value, sum(means) / len(own)):
        return shares + "It is the mean of the ranks' means. Hint: does every value have the same weight in that mean?"
    empty = [len(values) for values in own].count(0)
    if empty and is_close(value, total / (len(everything) + empty)):
        return shares + "Hint: what does a rank without values add to the number of values?"
    if is_close(value, total):
        return "It is the sum. Hint: what must it be divided by?"
    if is_close(value, total / len(own)):
        return shares + "It is the sum divided by the number of ranks. Hint: how many values does the sum contain?"
    if len(mine) and is_close(value, total / len(mine)):
        return shares + "It is the sum divided by this rank's number of values. Hint: whose values are in the sum?"
    if len(mine) and is_close(value, mine.mean().item()):
        return "It is the mean of this rank's own values. Hint: which tensor holds the result of the collective?"
    if abs(value - total / len(everything)) <= FLOAT32_TOLERANCE * abs(value):
        return "Only about 7 digits are right. Hint: which dtype do you send?"
    return shares + "Hint: which two numbers must a rank send to the others?"


def passing_cause(result: torch.Tensor, own: list[torch.Tensor], rank: int, right: int) -> str:
    if torch.equal(result, own[rank]):
        return "It is this rank's own tensor. Hint: which tensor receives the message, and which one is returned?"
    if torch.equal(result, own[right]):
        return "It is the right neighbor's tensor. Hint: which rank sends to which?"
    for other, tensor in enumerate(own):
        if torch.equal(result, tensor):
            return f"It is rank {other}'s tensor. Hint: which rank is the right neighbor of the last rank?"
    if bool((result == -1).any()):
        return (
            "The check wrote −1 into the left neighbor's tensor as soon as pass_right() had returned there. "
            "Hint: when may a tensor that is being sent be changed?"
        )
    return "Hint: is the message complete when you return the tensor?"


def broadcast_cause(found: list[torch.Tensor], own: list[torch.Tensor], wrong_ranks: list[int]) -> str:
    for sender, tensor in enumerate(own):
        if all(torch.equal(theirs, tensor) for theirs in found):
            return f"All ranks have rank {sender}'s tensor. Hint: which line uses src?"
    if all(torch.equal(found[rank], own[rank]) for rank in wrong_ranks):
        return "It is the rank's own tensor, unchanged. Hint: into which tensor do you receive the message?"
    return ""
