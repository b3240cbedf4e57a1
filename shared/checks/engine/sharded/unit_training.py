"""Train a model of units on ranks that hold shards of it, and compare it with one process that has all the data.

No probe reads a parameter that may have no memory. Its values are copied while the block that contains it runs.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import tolerance_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.plan import Plan, Report, RunStep, StepRecord
from shared.checks.engine.sharded.training import (
    Causes,
    describe_plan,
    judge_evaluation,
    judge_step,
    reference,
    reject_libraries,
    train,
)
from shared.checks.engine.sharded.wire import Flat
from shared.checks.engine.subgroups import join_subgroup
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_blocks, unit_models
from shared.wire import instrumentation

# -- compute which unit owns which parameters, and how many bytes it has, without the student's code


@dataclass(frozen=True)
class FlatPart:
    """A unit's parameters of one dtype, which are all trainable or all frozen.

    Attributes:
        stored: The flat tensor in the parameters' dtype.
        computed: The flat tensor in compute_dtype.
        trainable: Whether the parameters are trainable.
    """

    stored: Flat
    computed: Flat
    trainable: bool


@dataclass(frozen=True)
class Layout:
    units: tuple[tuple[FlatPart, ...], ...]
    root: tuple[FlatPart, ...]

    def parts(self) -> list[FlatPart]:
        return [part for unit in (*self.units, self.root) for part in unit]


def owners(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Assign each parameter to the innermost unit that contains it, or to the module if there is not exactly one."""
    around: dict[nn.Parameter, set] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        inner, innermost = module, module
        for step in name.split(".")[:-1]:
            inner = getattr(inner, step)
            innermost = inner if inner in units else innermost
        around.setdefault(parameter, set()).add(innermost)
    owned = {each: [] for each in (*units, module)}
    for parameter, candidates in around.items():
        owned[candidates.pop() if len(candidates) == 1 else module].append(parameter)
    return owned


def layout_of(model: str, dtype: torch.dtype = torch.float64, compute_dtype: torch.dtype | None = None) -> Layout:
    module = unit_models.build(model, 0, dtype)
    *units, root = owners(module, unit_models.units_of(model, module)).values()
    return Layout(tuple(_parts(each, compute_dtype) for each in units), _parts(root, compute_dtype))


def _parts(parameters: list[nn.Parameter], compute_dtype: torch.dtype | None) -> tuple[FlatPart, ...]:
    numbers: dict = {}
    for each in parameters:
        kind = each.dtype, each.requires_grad
        numbers[kind] = numbers.get(kind, 0) + each.numel()
    return tuple(
        FlatPart(Flat(count, dtype.itemsize), Flat(count, (compute_dtype or dtype).itemsize), trainable)
        for (dtype, trainable), count in numbers.items()
    )


@dataclass(frozen=True)
class UnitPlan(Plan):
    """A training of a wrapper.

    Args:
        options: The keyword arguments of the wrapper's constructor.
        finish_each: Whether to call finish_gradient_sync() after every micro-batch, or only after the last one.
        keeps_last: Whether the last unit stays unsharded between its forward and its backward.
    """

    optimizer: str = "SGD"
    options: dict = field(default_factory=dict)
    finish_each: bool = True
    keeps_last: bool = False

    def __str__(self) -> str:
        parts = [unit_models.describe(self.model), *(f"{name}={value}" for name, value in self.options.items())]
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += ["finish_gradient_sync() only after the last one"] * (not self.finish_each)
        parts += [f"clipped to {self.max_norm}"] * (self.max_norm is not None)
        return ", ".join(parts)

    def build(self, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
        return unit_models.build(self.model, seed, dtype or self.dtype)

    def shown(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert a state of one process to the dtype that the ranks compute with."""
        dtype = self.options.get("compute_dtype")
        if dtype is None:
            return state
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def shard(wrapper, module, plan: UnitPlan, group=None) -> Any:
    """Build the student's wrapper. PlainZeRO3 has no `prefetch`."""
    options = dict(plan.options)
    makers = [each.__init__ for each in getattr(wrapper, "__mro__", ())] or [wrapper]
    if not any("prefetch" in inspect.signature(each).parameters for each in makers):
        options.pop("prefetch", None)
    if unit_models.KINDS[plan.model].units:
        options["units"] = unit_models.units_of(plan.model, module)
    if group is not None:
        options["group"] = group
    reject_libraries([wrapper])
    wrapped = wrapper(module, **options)
    reject_libraries(type(thing) for thing in memory._reached([wrapped]))
    return wrapped


class StateReader:
    """Copies a module's state while it computes. It must be created before the module is wrapped."""

    def __init__(self, module):
        self.module, self.places = module, {}
        for name, _ in module.named_parameters(remove_duplicate=False):
            path, _, leaf = name.rpartition(".")
            self.places[name] = (path, leaf)

    def __call__(self, run: Callable):
        """Run forward. Return its result, and the state by name, without parameters that had no memory."""
        paths = {each: path for path, each in self.module.named_modules()}
        found = {name: buffer.detach().cpu().clone() for name, buffer in self.module.named_buffers()}

        def take(each) -> None:
            for name, (path, leaf) in self.places.items():
                if each in paths and f"{path}.".startswith(f"{paths[each]}.".lstrip(".")):
                    tensor = getattr(self.module.get_submodule(path), leaf)
                    if has_memory(tensor):
                        with instrumentation.violations_accepted():  # what is in flight is copied again when it runs
                            found[name] = tensor.detach().cpu().clone()

        unit_blocks.listeners.append(take)
        try:
            return run(), found
        finally:
            unit_blocks.listeners.remove(take)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be read. Reading freed memory would crash this process."""
    needed = tensor.storage_offset() + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not tensor.numel() or tensor.untyped_storage().nbytes() >= (needed + 1) * tensor.itemsize


def new_optimizer(plan: Plan, wrapped) -> torch.optim.Optimizer:
    cls, settings = plan.how_to_optimize()
    return cls(wrapped.parameters(), **settings)


@dataclass
class UnitStep(StepRecord):
    """What a rank records of one step."""

    training: list[instrumentation.Call] = field(default_factory=list)
    clipping: list[instrumentation.Call] = field(default_factory=list)
    evaluating: list[instrumentation.Call] = field(default_factory=list)  # in a forward after the step
    reduced: bool = False  # whether any shard had a gradient before the optimizer's step


def take_step(wrapped, optimizer, plan: UnitPlan, x, y) -> UnitStep:
    """Take one step. Returns its record, without what is evaluated after it."""
    optimizer.zero_grad()
    chunks = list(zip(x.chunk(plan.micro_batches), y.chunk(plan.micro_batches), strict=True))
    done = UnitStep()
    with instrumentation.listening() as done.training:
        for number, part in enumerate(chunks, 1):
            (awkward.loss_of(wrapped, *part) / plan.micro_batches).backward()
            if plan.finish_each or number == len(chunks):
                wrapped.finish_gradient_sync()
    done.reduced = any(each.grad is not None for each in wrapped.parameters())
    with instrumentation.listening() as done.clipping:
        if plan.max_norm is not None:
            done.norm = torch.as_tensor(wrapped.clip_grad_norm_(plan.max_norm)).detach().cpu().clone()
    optimizer.step()
    return done


@dataclass
class UnitReport(Report):
    """What a rank found in a training."""

    steps: list[UnitStep]
    evaluating: list[instrumentation.Call] = field(default_factory=list)  # in a forward before the first step
    dtypes: list[tuple[torch.dtype, torch.dtype | None]] = field(default_factory=list)  # of the shards and gradients
    few_digits: bool = False  # whether all gradients of shards are representable in bfloat16
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # full_state_dict(), in a subgroup


def probe_units(wrapper, plan: UnitPlan, seed: int, x, y) -> UnitReport | None:
    """Train, and capture the state in a forward without gradients after each step.

    Returns:
        What was found, or None on a rank that does not take part.
    """
    group, member = join_subgroup(plan.in_subgroup)
    if not member:
        return None
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    read_state = StateReader(module)
    with instrumentation.listening() as building:
        wrapped = shard(wrapper, module, plan, group)
    optimizer = new_optimizer(plan, wrapped)
    inputs, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)
    x = inputs
    found = UnitReport([], building)

    def evaluate() -> tuple[dict[str, torch.Tensor], list[instrumentation.Call]]:
        modes = {each: each.training for each in wrapped.modules()}
        wrapped.eval()
        with torch.no_grad(), instrumentation.listening() as calls:
            output, state = read_state(lambda: wrapped(inputs))
        for each, mode in modes.items():
            each.training = mode
        found.evaluated = output.cpu()
        return state, calls

    found.start, found.evaluating = evaluate()
    for _ in range(plan.steps):
        done = take_step(wrapped, optimizer, plan, x, y)
        done.state, done.evaluating = evaluate()
        found.steps.append(done)
        x = awkward.other_branches(x)
    found.dtypes = [(p.dtype, None if p.grad is None else p.grad.dtype) for p in wrapped.parameters()]
    gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
    found.few_digits = all(torch.equal(each, each.bfloat16().to(each.dtype)) for each in gradients)
    if plan.in_subgroup:
        found.whole = {name: value.cpu() for name, value in wrapped.full_state_dict().items()}
    return found


def train_and_judge(attempt: Attempt, plan: UnitPlan) -> dict[int, UnitReport]:
    """Train on fresh data. Returns what probe_units found, by global rank.

    Raises:
        Wrong: If a rank's state differs after a step from that of one process.
    """
    plan = replace(plan, steps=attempt.sizes.steps(plan.steps), learning_rate_factor=attempt.sizes.learning_rate_factor)
    draw, context = Draw(attempt), describe_plan(attempt, plan)
    found = train(attempt, plan, draw, probe_units)
    members = list(found)
    judge_start({rank: each.start for rank, each in found.items()}, plan, draw.seeds[members[0]], context)
    steps = reference(plan, draw, members).steps
    for number, expected in enumerate(steps):
        message = f"{context}, step {number + 1}"
        reject_missing({rank: each.steps[number].state for rank, each in found.items()}, expected.state, message)
        idle = [rank for rank, each in found.items() if not each.steps[number].reduced]
        if idle:
            evidence = f"{message}: before the optimizer's step, no shard has a gradient"
            raise Wrong(dict.fromkeys(idle, evidence), "Hint: which call gives shard.grad its value?")
        if plan.max_norm is not None:
            _judge_norms({rank: each.steps[number].norm for rank, each in found.items()}, expected, message)
        judge_step(found, expected, message, UnitCauses(plan, draw, number))
    judge_evaluation(plan, draw, found, steps, context)
    return found


def _judge_norms(norms: dict[int, torch.Tensor], expected: RunStep, context: str) -> None:
    norm = expected.norm.item()
    wrong = {
        rank: f"{context}: the norm is {found.item():.6g}, expected {norm:.6g}"
        for rank, found in norms.items()
        if found.numel() != 1
        or not abs(found.item() - norm) <= 10 * tolerance_of(expected.state.values()) * max(1, norm)
    }
    if wrong:
        hint = "Hint: over which elements do you compute the norm? And do you add up norms or their squares?"
        if len({found.item() for found in norms.values()}) > 1:
            hint = "Each rank has a different norm. Hint: what must the ranks exchange so that all get the same norm?"
        raise Wrong(wrong, hint)


def judge_start(states: dict[int, dict], plan: UnitPlan, seed: int, context: str) -> None:
    """Check that every rank starts with the state of the group's first rank.

    Raises:
        Wrong: If one does not.
    """
    reference = awkward.state_of(plan.build(seed))
    reject_missing(states, reference, f"{context}, in the first forward")
    for rank, state in states.items():
        for name, expected in reference.items():
            computed = plan.options.get("compute_dtype") if expected.is_floating_point() else None
            is_buffer = state[name].dtype == expected.dtype
            if not torch.equal(state[name], expected if is_buffer else expected.to(computed or expected.dtype)):
                hint = "Hint: whose values must all ranks start with? And in which order are they in the flat tensor?"
                message = f"{context}: in the first forward, {name} differs from that of the group's first rank"
                raise Wrong({rank: message}, hint)


def reject_missing(states: dict[int, dict], expected: dict, context: str) -> None:
    for rank, state in states.items():
        missing = [name for name in expected if name not in state]
        if missing:
            hint = "Hint: which parameters must be unsharded while this unit computes?"
            raise Wrong({rank: f"{context}: while its block computes, {missing[0]} has no memory"}, hint)


class UnitCauses(Causes):
    def otherwise(self) -> str:
        if self.plan.micro_batches > 1:
            return "Hint: what happens to the gradient of the first micro-batch when the second one is reduced?"
        return (
            "The previous steps are right. Hint: what is left over from the previous step?" if self.step_index else ""
        )
