"""Train ZeRO2 on ranks, micro-batch by micro-batch, and compare it with a plain optimizer in one process.

The plan, the loop in one process and the causes of wrong values are shared with chapter 07.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import MB, plan
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.plan import SCHEDULERS, Plan, Run
from shared.checks.engine.sharded.training import HINT_ON_OPTIMIZER_STATE, reject_libraries, train_and_judge
from shared.checks.engine.sharded.wire import Flat
from shared.checks.engine.subgroups import join_subgroup
from shared.checks.models import awkward
from shared.wire import instrumentation

TINY_CAP_MB = 200 / MB  # the awkward models have about 600 bytes


@dataclass(frozen=True)
class WrapperPlan(Plan):
    """Describe what is trained with ZeRO2, and how."""

    bucket_cap_mb: float = TINY_CAP_MB
    sends_each: bool = False  # every micro-batch is reduced; otherwise all but the last are inside no_sync()
    finishes: bool = True  # whether the loop calls finish_gradient_sync(); otherwise step() must

    def __str__(self) -> str:
        context = super().__str__()
        if self.micro_batches > 1:
            context += ", finish_gradient_sync() after each" if self.sends_each else ", all but the last in no_sync()"
        return context if self.finishes else f"{context}, without finish_gradient_sync()"

    def buckets(self) -> list[Flat]:
        parameters = awkward.build(self.model, 0, self.dtype).parameters()
        buckets = plan(parameters, self.bucket_cap_mb)
        return [Flat(sum(p.numel() for p in each), each[0].dtype.itemsize) for each in buckets]


class WrapperRun(Run):
    """Run one training on a rank. `optimizer` is the wrapper.

    Args:
        index: this rank's index in its group.
    """

    plan: WrapperPlan

    def __init__(self, zero2, module, plan: WrapperPlan, index: int = 0, group=None):
        further = {} if group is None else {"group": group}

        def wrap(_, cls, **settings):
            return zero2(module, cls, bucket_cap_mb=plan.bucket_cap_mb, **settings, **further)

        super().__init__(module, wrap, replace(plan, scheduler=""), alone=False, off=index)
        if plan.scheduler:
            self.scheduler = SCHEDULERS[plan.scheduler](self.optimizer.optimizer, plan.steps)

    def step(self, number: int, x, y) -> None:
        done = {"clip": [], "norm": None, "silent": [], "sent": [], "loss": None}
        with instrumentation.listening() as done["zero_grad"]:
            if number:
                self._drop_gradients(number)
        x, y, _ = self._at_work(number, x, y)
        batches = list(zip(x.chunk(self.plan.micro_batches), y.chunk(self.plan.micro_batches), strict=True))
        for batch in batches:
            self._micro_batch(batch, len(batches), is_last=batch is batches[-1], done=done)
        if self.plan.max_norm is not None:
            with instrumentation.listening() as done["clip"]:
                done["norm"] = self._clip().detach().cpu().clone()
        with instrumentation.listening() as done["step"]:
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps.append(done | self._state())

    def _drop_gradients(self, number: int) -> None:
        whose = self.plan.zero_grad[number % len(self.plan.zero_grad)]
        self.optimizer.zero_grad(**({"set_to_none": False} if whose == "keeping" else {}))

    def _micro_batch(self, batch: tuple, count: int, is_last: bool, done: dict) -> None:
        is_silent = not is_last and not self.plan.sends_each
        with self.optimizer.no_sync() if is_silent else contextlib.nullcontext(), instrumentation.listening() as calls:
            if len(batch[0]):
                (awkward.loss_of(self.optimizer, *batch) / count).backward()
        if self.plan.sends_each or (self.plan.finishes and not is_silent):
            with instrumentation.listening() as finishing:
                self.optimizer.finish_gradient_sync()
            calls += finishing
        done["silent" if is_silent else "sent"].append(calls)


def begin(zero2, plan: WrapperPlan, module, group=None) -> WrapperRun:
    """Wrap a module on this rank.

    Raises:
        AssertionError: if a library does the work.
    """
    reject_libraries([zero2])
    run = WrapperRun(zero2, module, plan, dist.get_rank(group), group)
    reached = memory._reached([run.optimizer])
    reject_libraries([type(thing) for thing in reached])
    return run


def probe_zero2(zero2, plan: WrapperPlan, seed: int, x, y) -> dict:
    """Train. Return the state that the ranks start with, and what each step did."""
    group, member = join_subgroup(plan.in_subgroup)
    if not member:
        return {"outside": True}
    module = awkward.build(plan.model, seed, plan.dtype).to(device_here())
    own = {id(p) for p in module.parameters()}
    run = begin(zero2, plan, module, group)
    start, elsewhere = awkward.state_of(module), _elsewhere(run.optimizer)
    run.train(x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype))
    left = {id(p) for p in run.optimizer.parameters()} == own == {id(p) for p in module.parameters()}
    run.optimizer.eval()
    with torch.no_grad():
        evaluated = run.optimizer(x.to(device_here(), plan.dtype)).cpu()
    found = {"start": start, "steps": run.steps, "building": run.building, "elsewhere": elsewhere}
    return found | {"replaced": "" if left else "the module", "evaluated": evaluated}


def _elsewhere(wrapped) -> list[str]:
    """Name the parameters that are not views of their bucket's flat parameter, if the wrapper shows its buckets."""
    flat_parameters = [getattr(bucket, "flat_parameter", None) for bucket in getattr(wrapped, "buckets", [])]
    flat_of = {id(p): each.flat_param for each in flat_parameters if each is not None for p in each.layout.parameters}
    return [
        name
        for name, parameter in wrapped.module.named_parameters()
        if id(parameter) in flat_of
        and parameter.untyped_storage().data_ptr() != flat_of[id(parameter)].untyped_storage().data_ptr()
    ]


def train_wrapper_and_judge(attempt: Attempt, plan: WrapperPlan) -> dict[int, dict]:
    """Train on fresh data. Return what probe_zero2 found, by global rank.

    Raises:
        Wrong: Unless every rank has the same state as one process after every step.
    """
    try:
        return train_and_judge(attempt, plan, probe_zero2)
    except Wrong as wrong:
        if wrong.hint == HINT_ON_OPTIMIZER_STATE:
            wrong.hint = "The earlier steps are correct. Hint: what does a bucket keep from one backward to the next?"
        raise
