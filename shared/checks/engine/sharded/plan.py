"""Train a model with a sharded or a plain optimizer: param groups, schedulers, closures and micro-batches.

The ranks and the kernel run the same loop. The ranks use the student's optimizer and their own samples, and the kernel
uses torch's optimizer and all samples. The kernel replaces a gradient of None by zeros. A run records what it sends in
each phase of a step, so that values and messages are judged from the same training.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from shared.checks.engine.sharded.wire import Flat, Phases, flats_of
from shared.checks.engine.training import SAMPLES_PER_RANK
from shared.checks.models import awkward
from shared.wire import instrumentation

LATE_NAME, LATE_STEP = "second.bias", 2


class UnknownOptimizer(torch.optim.Optimizer):
    """An optimizer that students do not know. Its state has names of its own, and one entry is a plain Python int."""

    def __init__(self, params, lr: float = 0.05, decay: float = 0.7):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                largest = state.setdefault("largest", torch.zeros_like(parameter))
                state["updates"] = state.get("updates", 0) + 1
                momentum.mul_(group["decay"]).add_(parameter.grad)
                torch.maximum(largest, momentum.abs(), out=largest)
                parameter.addcdiv_(momentum, largest + 1, value=-group["lr"] / state["updates"] ** 0.5)


# eps=1e-3, because with torch's 1e-8, a gradient that is zero except for rounding would become a step of size lr.
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3, "amsgrad": True, "betas": (0.8, 0.9)}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.05}),
    "UnknownOptimizer": (UnknownOptimizer, {"decay": 0.6}),
}
SCHEDULERS = {
    "OneCycleLR": lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1),
    "ExponentialLR": lambda optimizer, _: ExponentialLR(optimizer, 0.7),
}


@dataclass(frozen=True)
class Plan:
    """A model, an optimizer, and how to train."""

    hint_on_later_steps: ClassVar[str] = (
        "The previous steps are right. Hint: what does an optimizer keep from step to step?"
    )
    wraps: ClassVar[bool] = False  # the piece wraps the module and is not only its optimizer

    model: str
    optimizer: str = "AdamW"
    steps: int = 5
    in_subgroup: bool = False
    dtype: torch.dtype = torch.float64
    split: bool = False  # two param groups, of which one has its own learning rate
    scheduler: str = ""
    # Whose zero_grad() to call, in turn. "keeping" is the optimizer's zero_grad(set_to_none=False).
    zero_grad: tuple[str, ...] = ("optimizer",)
    micro_batches: int = 1
    closure: bool = False
    late: bool = False  # a parameter is added after some steps, and one step later its learning rate is halved
    idle: tuple[int, int] | None = None  # the (step, rank in the group) without a backward()
    max_norm: float | None = None
    fill: bool = True  # replace a plain optimizer's missing gradients by zeros
    loss_scale: float = 1.0  # to recognize gradients that are too large or too small
    learning_rate_factor: float = 1.0  # a factor for SGD's learning rate, with which long trainings diverge

    def __str__(self) -> str:
        known = self.optimizer != "UnknownOptimizer"
        parts = [awkward.describe(self.model), self.optimizer if known else "an optimizer made up for this check"]
        parts += ["two param groups"] * self.split + [self.scheduler] * bool(self.scheduler)
        parts += ["model.zero_grad()"] * ("model" in self.zero_grad) + ["step(closure)"] * self.closure
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [f"{LATE_NAME} added after step {LATE_STEP}"] * self.late
        parts += [f"rank {self.idle[1]} runs no backward in step {self.idle[0] + 1}"] if self.idle else []
        parts += [f"clipped to {self.max_norm}"] * (self.max_norm is not None)
        return ", ".join(parts)

    def how_to_optimize(self) -> tuple[type[torch.optim.Optimizer], dict]:
        """Return the class of the optimizer and its settings."""
        cls, settings = OPTIMIZERS[self.optimizer]
        if self.model == "Unused" and "weight_decay" in settings:
            settings = settings | {"weight_decay": 0.0}  # without a gradient, some optimizers decay, and others do not
        return cls, settings | {
            "lr": settings["lr"] * self.learning_rate_factor
        } if self.optimizer == "SGD" else settings

    def build(self, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the model, in the plan's dtype or in another one."""
        return awkward.build(self.model, seed, dtype or self.dtype)

    def begin(self, piece, module: nn.Module, further: dict, **how) -> "Run":
        """Give the module a student's optimizer. A plan of a wrapper wraps the module instead."""
        return Run(module, lambda params, cls, **settings: piece(params, cls, **settings, **further), self, **how)

    def flats(self) -> list[Flat]:
        """List the flat tensors that are sent in each step."""
        groups = groups_of(awkward.build(self.model, 0, self.dtype), self)
        return flats_of([group["params"] for group in groups] if self.split else [list(groups)])

    def shown(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert a state of one process to what the ranks report."""
        return state


def groups_of(module: nn.Module, plan: Plan) -> Any:
    """Return the optimizer's first argument: an iterator over parameters, a list of them, or two param groups."""
    if not (plan.split or plan.late):
        return module.parameters()
    own = [p for name, p in module.named_parameters() if not (plan.late and name == LATE_NAME)]
    if not plan.split:
        return own
    middle = len(own) // 2
    return [  # no optimizer knows the setting "name"
        {"params": own[:middle], "lr": 0.03, "weight_decay": 0.2, "name": "first"},
        {"params": own[middle:], "name": "second"},
    ]


@dataclass
class StepRecord:
    """What a rank records of one step, however it trains."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)  # after the step
    norm: Any = None  # a tensor, the norm before clipping; None without max_norm


@dataclass
class RunStep(StepRecord):
    """What a Run records of one step."""

    calls: Phases = field(default_factory=dict)
    loss: Any = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)  # if one process has all samples
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)  # by index in the group, if they differ


@dataclass
class Report:
    """What a rank found in a training, however it trains."""

    steps: list[StepRecord]
    building: list[instrumentation.Call]  # what the constructor sends
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: torch.Tensor | None = None  # the output in eval mode at the end, if the piece is a wrapper


@dataclass
class RunReport(Report):
    """What a Run has recorded on a rank."""

    steps: list[RunStep]
    replaced: str = ""  # whose nn.Parameter objects were replaced: those of "the module" or of "param_groups"
    elsewhere: list[str] = field(default_factory=list)  # the parameters that are not views of their bucket


class Run:
    """A training: a module, its optimizer, a scheduler, and a record of every step.

    Args:
        module: The module.
        make: Builds the optimizer from its first argument, its class and its settings.
        plan: How to train.
        alone: Whether this process has all samples.
        off: What to add to the late parameter on this rank before it is added to the optimizer.
        loaded: A state dict that the optimizer loads before the first step.
    """

    def __init__(
        self, module: nn.Module, make, plan: Plan, alone: bool = True, off: int = 0, loaded: dict | None = None
    ):
        cls, settings = plan.how_to_optimize()
        self.module, self.plan, self.alone, self.off = module, plan, alone, off
        self.steps: list[RunStep] = []
        self.calls: Phases = {}  # of the current step
        self.replicas = None  # for a module that mixes samples: one process computes each rank's samples separately
        if plan.late:  # it is not trained until it is added, so it must be the same on all ranks
            dict(module.named_parameters())[LATE_NAME].data.zero_()
        with instrumentation.listening() as self.building:
            self.optimizer = make(groups_of(module, plan), cls, **settings)
        if loaded is not None:
            self.optimizer.load_state_dict(loaded)
        self.scheduler = None
        if plan.scheduler:
            scheduled = self.optimizer.optimizer if plan.wraps and not alone else self.optimizer
            self.scheduler = SCHEDULERS[plan.scheduler](scheduled, plan.steps)

    def train(self, x, y) -> "Run":
        if self.alone and awkward.mixes_samples(self.module):
            self.replicas = awkward.Replicas(self.module, len(x) // SAMPLES_PER_RANK)
        for step_index in range(self.plan.steps):
            if self.plan.late and step_index == LATE_STEP:
                late = dict(self.module.named_parameters())[LATE_NAME]
                late.data += self.off
                self.optimizer.add_param_group({"params": [late], "lr": 0.05})
            if self.plan.late and step_index == LATE_STEP + 1:
                self.optimizer.param_groups[-1]["lr"] /= 2
            self.step(step_index, x, y)
            x = awkward.other_branches(x)
        return self

    def step(self, step_index: int, x, y) -> None:
        self.calls = {}
        done = RunStep(calls=self.calls)
        if self.plan.closure:
            with self.phase("step()"):
                done.loss = self.optimizer.step(lambda: self.backward(step_index, x, y))
        else:
            done.loss = self.backward(step_index, x, y)
            if self.plan.max_norm is not None:
                with self.phase("clip_grad_norm_()"):
                    done.norm = self._clip().detach().cpu().clone()
            if self.alone:
                done.gradients = awkward.gradients_of(self.module, every_name=True)
            with self.phase("step()"):
                self.optimizer.step()
        done.state, done.buffers = self._state()
        self.steps.append(done)
        if self.scheduler:
            self.scheduler.step()

    @contextlib.contextmanager
    def phase(self, name: str):
        """Record what is sent as part of a phase."""
        with instrumentation.listening() as calls:
            yield
        self.calls.setdefault(name, []).extend(calls)

    def backward(self, step_index: int, x, y) -> torch.Tensor | None:
        """Return the loss on the whole batch."""
        if step_index:  # before the first step there are no gradients
            with self.phase("zero_grad()"):
                self.zero_grad(self.plan.zero_grad[step_index % len(self.plan.zero_grad)])
        return self.accumulate(*self.at_work(step_index, x, y))

    def zero_grad(self, whose: str) -> None:
        if whose == "keeping":
            self.optimizer.zero_grad(set_to_none=False)
        else:
            (self.module if whose == "model" else self.optimizer).zero_grad()

    def accumulate(self, x, y, share: float) -> torch.Tensor | None:
        """Run the backward passes of a step. Returns the loss on the whole batch."""
        with self.phase("backward()"):
            losses = self._losses(x, y)
            for loss in losses:
                (loss * self.plan.loss_scale * share).backward()
        if self.alone and self.plan.fill:
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return sum(losses, torch.zeros(())).detach()

    def _losses(self, x, y) -> list[torch.Tensor]:
        """Compute the losses of the micro-batches. Their sum is the loss on the whole batch."""
        batches: list[tuple[Any, torch.Tensor, torch.Tensor]] = [(self.module, x, y)]
        if self.replicas is not None:
            batches = list(zip(self.replicas, x.split(SAMPLES_PER_RANK), y.split(SAMPLES_PER_RANK), strict=True))
        count = self.plan.micro_batches
        return [
            awkward.loss_of(module, *part) / (count * len(batches))
            for module, inputs, targets in batches
            for part in zip(inputs.chunk(count), targets.chunk(count), strict=True)
            if len(part[0])
        ]

    def _state(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """Return the state and, by index in the group, the buffers that differ between ranks."""
        state, buffers = awkward.state_of(self.module), []
        if self.alone:
            state = self.plan.shown(state)
        if self.replicas is not None:
            buffers = [{name: each.clone() for name, each in own.items()} for own in self.replicas.buffers]
            state = {name: value for name, value in state.items() if name not in buffers[0]}
        return state, buffers

    def at_work(self, step_index: int, x, y) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return the samples of the ranks that run a backward, and their fraction of all samples."""
        if self.plan.idle is None or step_index != self.plan.idle[0]:
            return x, y, 1.0
        if not self.alone:
            mine = self.off == self.plan.idle[1]
            return x[: 0 if mine else None], y[: 0 if mine else None], 1.0
        first = self.plan.idle[1] * SAMPLES_PER_RANK
        at_work = [sample for sample in range(len(x)) if not first <= sample < first + SAMPLES_PER_RANK]
        return x[at_work], y[at_work], len(at_work) / len(x)

    def report(self, own: set[int], x) -> RunReport:
        """Return what the run has recorded on a rank.

        Args:
            own: The ids of the module's parameters before the optimizer was built.
            x: The inputs of the first step.
        """
        theirs = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        replaced = "" if {id(p) for p in self.module.parameters()} == own else "the module"
        return RunReport(self.steps, self.building, replaced=replaced if own >= theirs else "param_groups")

    def _clip(self) -> torch.Tensor:
        assert self.plan.max_norm is not None
        if not self.alone:
            return self.optimizer.clip_grad_norm_(self.plan.max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), self.plan.max_norm)
