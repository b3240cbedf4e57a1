"""Train ZeRO2 on ranks, micro-batch by micro-batch. All else is shared with chapter 07."""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shared.checks.engine.buckets import MB, plan
from shared.checks.engine.sharded.plan import Plan, Run, RunReport
from shared.checks.engine.sharded.wire import Flat
from shared.checks.models import awkward

TINY_CAP_MB = 200 / MB  # the awkward models have about 600 bytes


@dataclass(frozen=True)
class WrapperPlan(Plan):
    """Describe what is trained with ZeRO2, and how."""

    hint_on_later_steps: ClassVar[str] = (
        "The earlier steps are correct. Hint: what does a bucket keep from one backward to the next?"
    )
    wraps: ClassVar[bool] = True

    bucket_cap_mb: float = TINY_CAP_MB
    sends_each: bool = False  # every micro-batch is reduced; otherwise all but the last are inside no_sync()
    finishes: bool = True  # whether the loop calls finish_gradient_sync(); otherwise step() must

    def __str__(self) -> str:
        context = super().__str__()
        if self.micro_batches > 1:
            context += ", finish_gradient_sync() after each" if self.sends_each else ", all but the last in no_sync()"
        return context if self.finishes else f"{context}, without finish_gradient_sync()"

    def begin(self, piece, module: nn.Module, further: dict, **how) -> "WrapperRun":
        def wrap(_, cls, **settings):
            return piece(module, cls, bucket_cap_mb=self.bucket_cap_mb, **settings, **further)

        return WrapperRun(module, wrap, self, **how)

    def flats(self) -> list[Flat]:
        buckets = plan(awkward.build(self.model, 0, self.dtype).parameters(), self.bucket_cap_mb)
        return [Flat(sum(p.numel() for p in each), each[0].dtype.itemsize) for each in buckets]


class WrapperRun(Run):
    """A training on a rank. `optimizer` is the wrapper."""

    plan: WrapperPlan

    def accumulate(self, x, y, share: float) -> None:
        count = self.plan.micro_batches
        for number, batch in enumerate(zip(x.chunk(count), y.chunk(count), strict=True), 1):
            is_silent = number < count and not self.plan.sends_each
            phase = "no_sync()" if is_silent else f"micro-batch {number}" if count > 1 else "backward()"
            with self.phase(phase), self.optimizer.no_sync() if is_silent else contextlib.nullcontext():
                if len(batch[0]):
                    (awkward.loss_of(self.optimizer, *batch) / count).backward()
                if not is_silent and (self.plan.sends_each or self.plan.finishes):
                    self.optimizer.finish_gradient_sync()

    def report(self, own: set[int], x) -> RunReport:
        left = {id(p) for p in self.optimizer.parameters()} == own == {id(p) for p in self.module.parameters()}
        self.optimizer.eval()
        with torch.no_grad():
            evaluated = self.optimizer(x).cpu()
        replaced, elsewhere = "" if left else "the module", self._elsewhere()
        return RunReport(self.steps, self.building, evaluated=evaluated, replaced=replaced, elsewhere=elsewhere)

    def _elsewhere(self) -> list[str]:
        """Name the parameters that are not views of their bucket's flat parameter, if the wrapper shows its buckets."""
        flat_parameters = [getattr(bucket, "flat_parameter", None) for bucket in getattr(self.optimizer, "buckets", [])]
        flat_of = {
            id(p): each.flat_param for each in flat_parameters if each is not None for p in each.layout.parameters
        }
        return [
            name
            for name, parameter in self.module.named_parameters()
            if id(parameter) in flat_of
            and parameter.untyped_storage().data_ptr() != flat_of[id(parameter)].untyped_storage().data_ptr()
        ]
