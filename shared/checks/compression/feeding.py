"""Feed drawn gradients to OverlappedDDP with a student's compressor, and record what comes out.

The parameters belong to a module whose gradients are exactly the tensors that the check has drawn. So a check can
choose each rank's gradient in each step, and knows all of them.
"""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shared import wire
from shared.checks.engine.buckets import plan
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.overlap_probes import Waits
from shared.checks.engine.subgroups import join_subgroup
from shared.wire import completion, instrumentation

MB = 2**20
Gradients = list[torch.Tensor | None]  # one per parameter; None if the rank does not use it


@dataclass(frozen=True)
class Setting:
    """The parameters, and the compressor to try."""

    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple = ()  # of the compressor's constructor
    dtype: torch.dtype = torch.float64
    cap_mb: float = 25.0
    frozen: tuple[int, ...] = ()  # the indices of frozen parameters
    set_to_none: bool = True
    in_subgroup: bool = False
    said: str = field(default="", compare=False)  # what is special about it

    def parameters(self) -> list[nn.Parameter]:
        """Build the parameters, all zeros."""
        built = [nn.Parameter(torch.zeros(shape, dtype=self.dtype)) for shape in self.shapes]
        for index in self.frozen:
            built[index].requires_grad_(False)
        return built

    def buckets(self) -> list[list[int]]:
        """Return the indices of the parameters in each bucket, in the order in which buckets are launched."""
        parameters = self.parameters()
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        return [[index_of[id(each)] for each in bucket] for bucket in plan(parameters, self.cap_mb)]

    def __str__(self) -> str:
        numel = sum(torch.Size(shape).numel() for shape in self.shapes)
        buckets = counted(len(self.buckets()), "bucket")
        described = f"{counted(len(self.shapes), 'parameter')} with {numel} elements in {buckets}"
        return described + (self.said and f", {self.said}")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- on a rank


class WaitsByWork(Waits):
    """Also remembers for which asynchronous operations nothing has waited yet."""

    def __init__(self):
        super().__init__()
        self.not_waited_for: dict[int, tuple] = {}  # id of a Work → (the Work, kept alive; what it does)
        self.launched_in_hooks = 0

    def launched(self, call, work, tensors) -> None:
        is_in_hook = torch._C._current_autograd_node() is not None
        self.launched_in_hooks += is_in_hook
        self.in_hooks += is_in_hook and not call.is_async
        if call.is_async:
            self.not_waited_for[id(work)] = (work, str(call))

    def waited(self, work_id, began) -> None:
        self.not_waited_for.pop(work_id, None)
        super().waited(work_id, began)


class Fed(nn.Module):
    """A module whose parameters get given gradients."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__()
        self.each = nn.ParameterList(parameters)

    def forward(self, gradients: Gradients) -> torch.Tensor:
        used = [(p, g) for p, g in zip(self.each, gradients, strict=True) if g is not None and p.requires_grad]
        nothing = torch.zeros((), device=device_here(), requires_grad=True)  # a rank may use no parameter at all
        return sum(((p * g.to(p)).sum() for p, g in used), nothing)


@dataclass
class Stepped:
    """The gradients after a step, and what this rank has sent in it outside of no_sync()."""

    gradients: Gradients
    sent_bytes: float
    ops: list[str]
    dtypes: list[str]
    messages: int
    launched_in_hooks: int  # collectives
    waits_in_hooks: int
    launched_quietly: int  # collectives inside no_sync()
    not_waited_for: list[str]  # operations


def probe_feeding(piece, setting: Setting, steps: list[list[Gradients]]) -> list[Stepped]:
    """Run one step for each list of micro-batches, with the student's compressor."""
    return run_steps(piece(*setting.arguments), setting, steps)


def run_steps(compressor, setting: Setting, steps: list[list[Gradients]]) -> list[Stepped]:
    """Run one step for each list of micro-batches."""
    group, is_member = join_subgroup(setting.in_subgroup)
    if not is_member:
        return []
    wrapper = earlier_piece("overlapped_ddp", "OverlappedDDP")
    further = {"group": group} if setting.in_subgroup else {}
    model = wrapper(
        Fed(setting.parameters()).to(device_here()),
        bucket_cap_mb=setting.cap_mb,
        compressor=compressor,
        **further,
    )
    return [_step(model, micro_batches, setting.set_to_none) for micro_batches in steps]


def _step(model, micro_batches: list[Gradients], set_to_none: bool) -> Stepped:
    model.zero_grad(set_to_none)
    *silent, last = micro_batches
    with instrumentation.listening() as quiet, model.no_sync() if silent else contextlib.nullcontext():
        for gradients in silent:
            model(gradients).backward()
    waits = WaitsByWork()
    with completion.watching(waits), instrumentation.listening(waits.launched) as calls:
        model(last).backward()
        model.finish_gradient_sync()
    return Stepped(
        gradients=[None if p.grad is None else p.grad.detach().cpu().clone() for p in model.module.each],
        sent_bytes=sum(wire.sent_bytes_of(call, dist.get_rank()) for call in calls),
        ops=sorted({call.op for call in calls}),
        dtypes=sorted({call.dtype for call in calls}),
        messages=len(calls),
        launched_in_hooks=waits.launched_in_hooks,
        waits_in_hooks=waits.in_hooks,
        launched_quietly=len(quiet),
        not_waited_for=[operation for _, operation in waits.not_waited_for.values()],
    )


def probe_two_models(
    piece, setting: Setting, steps: list[list[Gradients]], others: list[list[Gradients]]
) -> list[Stepped]:
    """Train two models in turn with one compressor. Returns the steps of the first one."""
    wrapper = earlier_piece("overlapped_ddp", "OverlappedDDP")
    compressor = piece(*setting.arguments)
    models = [
        wrapper(Fed(setting.parameters()).to(device_here()), bucket_cap_mb=setting.cap_mb, compressor=compressor)
        for _ in range(2)
    ]
    found = []
    for own, other in zip(steps, others, strict=True):
        found.append(_step(models[0], own, True))
        _step(models[1], other, True)
    return found
