"""Judge the numbers that first collectives give back, and guess from a wrong result how it came about."""

import torch

from shared.checks.engine.framework import Wrong

FLOAT32_TOLERANCE = 1e-6  # a float32 keeps 7 digits: a few additions of a few numbers stay within it


def judge_numbers(found: list[tuple[str, object]], expected: float, tolerance: float, cause_of) -> None:
    """Every rank's number must be a float within tolerance of want; else cause_of(rank, number) hints why.

    Raises: Wrong.
    """
    wrong, hints = {}, []
    for rank, (kind, value) in enumerate(found):
        if kind != "float":
            wrong[rank] = f"gave back {with_article(kind)}, expected a float"
            hints.append("Hint: what does tensor.item() do?" if kind == "Tensor" else "")
        elif not abs(value - expected) <= tolerance * max(1.0, abs(expected)):
            wrong[rank] = "gave back {}, expected {}".format(*_told_apart(value, expected))
            hints.append(cause_of(rank, value))
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _told_apart(found: float, expected: float) -> tuple[str, str]:
    """Write two numbers as shortly as they still differ."""
    short = f"{found:.6g}", f"{expected:.6g}"
    return short if short[0] != short[1] else (repr(found), repr(expected))


def with_article(kind: str) -> str:
    return "None" if kind == "NoneType" else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def is_close(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-9 * max(1.0, abs(other))


def common_cause(value: float, own: float, every: list[float]) -> str:
    """Recognize the usual mistakes in a number that should be the ranks' sum, or some mean of it."""
    if len(every) == 1:
        return ""
    if value == own:
        return "It is this rank's own: nothing has come from the others."
    if value == max(every):
        return "It is the largest of all. Hint: the operation."
    if value in every:
        return f"It is what rank {every.index(value)} alone would give."
    if is_close(value, own * len(every)):
        return f"It is {len(every)} times this rank's own: nothing has come from the others."
    return ""


def mean_cause(own: list[torch.Tensor], rank: int, value: float) -> str:
    everything, mine = torch.cat(own), own[rank]
    total, means = everything.sum().item(), [values.mean().item() for values in own if len(values)]
    shares = f"The ranks hold {'/'.join(str(len(values)) for values in own)} values. "
    if value != value:
        return shares + "The mean of no values is nan. Hint: what should a rank that holds none send?"
    if is_close(value, sum(means) / len(means)) or is_close(value, sum(means) / len(own)):
        return shares + "It is the mean of the ranks' means. Hint: does every value weigh the same in it?"
    if is_close(value, total):
        return "It is the sum: it is divided by nothing."
    if is_close(value, total / len(own)):
        return shares + "It is divided by the number of ranks, not of values."
    if len(mine) and is_close(value, total / len(mine)):
        return shares + "It is divided by this rank's own number of values."
    if len(mine) and is_close(value, mine.mean().item()):
        return "It is the mean of this rank's own values: nothing has come from the others."
    if abs(value - total / len(everything)) <= FLOAT32_TOLERANCE * abs(value):
        return "Right to 7 digits. Hint: which dtype is sent?"
    return shares + "Hint: which two numbers does a rank have to tell the others?"


def passing_cause(result: torch.Tensor, own: list[torch.Tensor], rank: int, right: int) -> str:
    if torch.equal(result, own[rank]):
        return "It is this rank's own tensor: nothing has arrived in what is given back."
    if torch.equal(result, own[right]):
        return "It is the right neighbor's tensor. Hint: who sends to whom?"
    for other, tensor in enumerate(own):
        if torch.equal(result, tensor):
            return f"It is rank {other}'s tensor. Hint: who is the neighbor of the last rank?"
    if bool((result == -1).any()):
        return (
            "−1 is what the left neighbor wrote into its tensor when its call had returned. "
            "Hint: when may a tensor that is being sent be changed?"
        )
    return "Hint: is the message complete when you give the tensor back?"


def broadcast_cause(found: list[torch.Tensor], own: list[torch.Tensor], wrong_ranks: list[int]) -> str:
    for sender, tensor in enumerate(own):
        if all(torch.equal(theirs, tensor) for theirs in found):
            return f"All have rank {sender}'s tensor. Hint: where does src come in?"
    if all(torch.equal(found[rank], own[rank]) for rank in wrong_ranks):
        return "It is what the rank held before. Hint: what is filled in place?"
    return ""
