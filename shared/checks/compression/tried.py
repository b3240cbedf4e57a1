"""What a student's compressor was fed with, and what every rank got."""

from dataclasses import dataclass

import torch

from shared.checks.compression.feeding import Gradients, Setting
from shared.checks.compression.references import Method

Steps = list[list[list[Gradients]]]  # by step, rank and micro-batch


@dataclass(frozen=True)
class Tried:
    """A compressor that has been fed."""

    method: Method
    setting: Setting
    steps: Steps
    members: list[int]
    found: dict[int, list[dict]]  # by global rank, for each step

    @property
    def context(self) -> str:
        return f"{self.method.said}, {self.setting}"

    def results(self, rank: int, step: int) -> Gradients:
        return self.found[rank][step]["gradients"]

    def means(self, step: int) -> list[torch.Tensor]:
        """Return the mean gradients of a step, in float64."""
        return [sum(share.double() for share in each) for each in zip(*self.shares(step), strict=True)]

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
