"""Hints about gradients that a compressor gets wrong.

A mistake is only named if the values cannot come from another one.
"""

from dataclasses import dataclass
from typing import Any

import torch

from shared.checks.compression.feeding import Gradients, Setting, Stepped
from shared.checks.compression.references import Int8, PowerSGD, TopK, matrix_of
from shared.checks.engine.compare import total_of

# -- what a student's compressor was fed with, and what every rank got


Steps = list[list[list[Gradients]]]  # by step, rank and micro-batch


@dataclass(frozen=True)
class Tried:
    """A compressor that has been fed."""

    method: Any  # a Method, or one of a check, such as InTurnMethod
    setting: Setting
    steps: Steps
    members: list[int]
    found: dict[int, list[Stepped]]  # by global rank, for each step

    @property
    def context(self) -> str:
        return f"{self.method.said}, {self.setting}"

    def results(self, rank: int, step: int) -> Gradients:
        return self.found[rank][step].gradients

    def means(self, step: int) -> list[torch.Tensor]:
        """Return the mean gradients of a step, in float64."""
        return [total_of(share.double() for share in each) for each in zip(*self.shares(step), strict=True)]

    def shares(self, step: int) -> list[list[torch.Tensor]]:
        """Return each member's gradients of a step, divided by the number of members as the bucket does it.

        They have the dtype of what is unsent: float32 for bf16 parameters, so that a comparison chooses alike.
        """
        dtype, count = self.setting.dtype, len(self.members)
        kept_in = torch.promote_types(dtype, torch.float32)
        shares = []
        for micro_batches in self.steps[step]:
            totals = [torch.zeros(shape, dtype=dtype) for shape in self.setting.shapes]
            for gradients in micro_batches:
                for total, gradient in zip(totals, gradients, strict=True):
                    total += 0 if gradient is None else gradient.to(dtype)
            shares.append([(total / count).to(kept_in) for total in totals])
        return shares

    def trained(self) -> list[int]:
        return [index for index in range(len(self.setting.shapes)) if index not in self.setting.frozen]


ON_WHAT_IS_SENT = "Hint: what exactly has this rank sent, and is exactly that subtracted from what is unsent?"
ON_TRAINING = {
    Int8: "Hint: what happens to the rounding error of the first message, and to that of the second one?",
    TopK: "Hint: what happens to the part of a gradient that is never among what you send?",
    PowerSGD: "Hint: what happens to the part of a matrix that P·Qᵀ leaves out?",
}
_ON_LATER_STEPS = {
    TopK: ON_WHAT_IS_SENT,
    PowerSGD: "Hint: what exactly has this rank sent, and with which Q does the next step start?",
}
_ON_DIVISION = "Hint: which line divides by zero, or by something very small?"


def on_steps(tried: Tried, step: int, rank: int, index: int) -> str:
    """Return a hint about a parameter's wrong gradient, if a reference tells all values."""
    count, mean, result = len(tried.members), tried.means(step)[index], tried.results(rank, step)[index]
    reference = tried.method.reference(tried.setting)
    assert reference is not None and result is not None
    for earlier in range(step + 1):
        expected = reference.step(tried.shares(earlier))
    if count > 1 and _equal(result, expected[index] / count):
        return f"It is exactly {count} times too small. Hint: what has pack() divided by already?"
    if not result.isfinite().all():
        return _ON_DIVISION
    if step and _equal(result, mean):
        return "It is the mean of this step only. Hint: what has the step before left unsent?"
    if step:
        later = _ON_LATER_STEPS.get(type(tried.method), "Hint: what must a rank keep from one step to the next?")
        return f"The first step is right. {later}"
    if isinstance(tried.method, TopK) and (hint := _on_chosen_elements(tried, rank, expected)):
        return hint
    if isinstance(tried.method, PowerSGD) and matrix_of(tried.setting.shapes[index], tried.method.rank):
        return "Hint: here, P·Qᵀ must equal ΣM. Do all ranks multiply by the same P, and are its columns orthonormal?"
    return "Hint: which tensors do you send, and are they complete when you read what was received?"


def _on_chosen_elements(tried: Tried, rank: int, expected: dict[int, torch.Tensor]) -> str:
    """Return a hint about the first step of TopK, or "" if the mistake is not a common one."""
    results = tried.results(rank, 0)
    own = {index: result for index, result in enumerate(results) if result is not None}
    if not own.keys() >= {*tried.trained()}:
        return ""
    found, right, *shares = (
        torch.cat([tensors[index].flatten() for index in tried.trained()]).double()
        for tensors in (own, expected, *tried.shares(0))
    )
    if _equal(found, right + shares[tried.members.index(rank)]):
        return "This rank's own gradients are added to it. Hint: what does `flat` hold before you write into it?"
    if found.max() > 0 and found.min() >= 0 > right.min():
        return "None of the elements that were sent is negative. Hint: of which tensor do you take the largest?"
    off = (found - right).abs() > 1e-6 * right.abs().max()
    if len(shares) == 2 and _equal(right[off], total_of(shares)[off]):
        nearest = torch.stack([(found - own).abs() for own in shares])[:, off].amin(0)
        if bool((nearest <= 1e-6 * right.abs().max()).all()):
            return "Where both ranks have sent an element, one of the two is missing. Hint: how do you add them up?"
    received, due = (int((each != 0).sum()) for each in (found, right))
    if received != due:
        return f"{received} elements of the mean are not 0, expected {due}. Hint: how many does each rank send?"
    return ""


def on_rounding(step: int, found: float, right: float, count: int) -> str:
    """Return a hint about an element that rounding alone does not explain.

    Args:
        step: The index of the step after which it is wrong.
        found: The sum of what was applied.
        right: The sum of the mean gradients.
        count: The number of ranks.
    """
    if found != found or abs(found) == float("inf"):
        return _ON_DIVISION
    if count > 1 and abs(found * count - right) < 0.05 * abs(right):
        return f"It is {count} times too small. Hint: what has pack() divided by already?"
    if step and count == 1:
        return f"The first step is right, so an error adds up from step to step. {ON_WHAT_IS_SENT}"
    if step:
        return (
            "The first step is right, so an error adds up from step to step. "
            "Hint: an element is rounded twice, by two ranks. Where does each of these errors stay?"
        )
    return "Hint: which scales belong to which integers, and in which dtype do you add up?"


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-4 * (1e-9 + expected.abs().max().item()) if expected.numel() else 0.0
    return bool(((found.double() - expected.double()).abs() <= tolerance).all())
