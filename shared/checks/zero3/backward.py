"""Judge backward: what is rejected, what must be reset, and several forwards."""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded import unit_order
from shared.checks.engine.sharded.training import judge_states, plain
from shared.checks.engine.sharded.unit_training import (
    StateReader,
    UnitPlan,
    has_memory,
    new_optimizer,
    reject_missing,
    shard,
    take_step,
)
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models
from shared.checks.models.unit_blocks import WIDTH
from shared.wire import completion, instrumentation

# -- judge the hooks of forward by themselves: what pre_forward() and post_forward() call, and in which order
#
# If the units or hooks of a ZeRO3 are written differently, only its values, its backward and the order of its
# all-gathers are judged.


_PLAN = UnitPlan("Blocks", options={"prefetch": 0})
_NAMES = ["block 0", "block 1", "block 2", "the root"]
_ORDER_PLAN = UnitPlan(unit_order.MODEL, options={"prefetch": 1})
_RECORDED = (True, True, False)  # whether each forward records gradients; the order of units is known from the second


def _build(wrapper, seed: int) -> tuple:
    """Return the module, the wrapped model and its units; no units if they are written differently."""
    module = unit_models.build(_PLAN.model, seed).to(device_here())
    wrapped = shard(wrapper, module, _PLAN)
    units = list(getattr(wrapped, "units", []))
    is_ours = len(units) == len(_NAMES) and all(hasattr(each, "state") for each in units)
    return module, wrapped, units if is_ours else []


def probe_ready(wrapper, seed: int, x, y) -> list[str] | None:
    """Run a forward, and return the state of each unit when it computes.

    A unit that is not ready is unsharded here, because reading it could crash this process.
    """
    module, wrapped, units = _build(wrapper, seed)
    found = [""] * len(units)

    def note(index: int) -> None:
        found[index] = units[index].state.name
        units[index].wait_for_unshard()

    for index, submodule in enumerate((*module.blocks, module) if units else ()):  # this runs after the wrapper's hooks
        submodule.register_forward_pre_hook(lambda *_, index=index: note(index))
    wrapped(x.to(device_here()))
    return found


def units_are_unsharded_when_they_compute(attempt: Attempt) -> None:
    for rank, states in enumerate(attempt.run(probe_ready, per_rank=Draw(attempt).per_rank, context=str(_PLAN))):
        for name, state in zip(_NAMES, states, strict=False):
            if state != "UNSHARDED":
                evidence = f"{_PLAN}: when {name} computes, it is {state}; expected UNSHARDED"
                raise Wrong({rank: evidence}, "Hint: what must be complete before pre_forward() returns?")


@dataclass
class Hooked:
    """Which hooks were called, with the index of their unit."""

    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    in_backward_state: list[tuple[str, int]]  # in a forward of block 0 while it is in BACKWARD


def probe_hooks(wrapper, seed: int, x, y) -> Hooked | None:
    """Run forward and backward with hooks of backward that only record their calls."""
    calls: list[tuple[str, int]] = []
    if not all(hasattr(wrapper, name) for name in ("_watch_inputs", "_watch_outputs")):
        return None

    class Noting(wrapper):
        def pre_backward(self, unit, _call) -> None:
            calls.append(("pre_backward()", units.index(unit)))
            unit.wait_for_unshard()

        def post_backward(self, unit, _call) -> None:
            calls.append(("post_backward()", units.index(unit)))

        def _watch_inputs(self, unit, inputs, kwargs):
            calls.append(("_watch_inputs()", units.index(unit)))
            return super()._watch_inputs(unit, inputs, kwargs)

        def _watch_outputs(self, unit, output) -> None:
            calls.append(("_watch_outputs()", units.index(unit)))
            if unit in self.calls:  # otherwise, the recorded calls show the mistake
                super()._watch_outputs(unit, output)

    module, wrapped, units = _build(Noting, seed)
    if not units:
        return None
    x = x.to(device_here()).requires_grad_()  # so that backward reaches the root's inputs, too
    output = wrapped(x)
    in_forward = calls[:]
    calls.clear()
    output.sum().backward()
    in_backward = calls[:]
    calls.clear()
    first, prefetcher = units[0], wrapped.prefetcher
    first.wait_for_unshard()
    first.state = type(first.state).BACKWARD
    prefetcher.in_forward = lambda unit: calls.append(("prefetcher.in_forward()", units.index(unit)))
    module.blocks[0](x.new_zeros(2, WIDTH))
    return Hooked(in_forward, in_backward, calls[:])


def backward_will_call_its_hooks(attempt: Attempt) -> None:
    for rank, found in enumerate(attempt.run(probe_hooks, per_rank=Draw(attempt).per_rank, context=str(_PLAN))):
        if found is None:
            continue
        for watch, by in (("_watch_inputs()", "pre_forward()"), ("_watch_outputs()", "post_forward()")):
            if missing := _units_without(watch, found.forward):
                evidence = f"{_PLAN}: {by} does not call {watch} for {missing}"
                raise Wrong({rank: evidence}, "Hint: for which units does the exercise ask for this call, and when?")
        if missing := _units_without("post_backward()", found.backward):
            evidence = f"{_PLAN}: autograd never calls post_backward() for {missing}"
            hint = "Hint: does a unit compute with the watched inputs, or with those that it was called with?"
            raise Wrong({rank: evidence}, hint)
        if missing := _units_without("pre_backward()", found.backward):
            evidence = f"{_PLAN}: autograd never calls pre_backward() for {missing}"
            raise Wrong({rank: evidence}, "Hint: which output does post_forward() watch?")
        for call, _ in found.in_backward_state:
            evidence = f"{_PLAN}: when block 0 is in BACKWARD and its forward runs again, {call} is called"
            hint = "Hint: what repeats a forward in the middle of backward, and what may the hooks of forward do then?"
            raise Wrong({rank: evidence}, hint)


def _units_without(name: str, calls: list[tuple[str, int]]) -> str:
    return ", ".join(unit for index, unit in enumerate(_NAMES) if (name, index) not in calls)


def probe_order(wrapper, numels: list[int], seed: int, x, y) -> list[list[unit_order.Event]]:
    """Run forwards without a backward, and return what happened in each."""
    module = unit_models.build(_ORDER_PLAN.model, seed).to(device_here())
    wrapped, x, found = shard(wrapper, module, _ORDER_PLAN), x.to(device_here()), []
    for records in _RECORDED:
        log = unit_order.Log(numels, _ORDER_PLAN.dtype.itemsize, torch.distributed.get_world_size())
        module.passed = log.passed
        with (
            torch.set_grad_enabled(records),
            completion.watching(log),
            instrumentation.listening(log.launched, log.waiting),
        ):
            wrapped(x)
        module.passed = None
        found.append(log.events)
    return found


def the_next_unit_is_in_flight(attempt: Attempt) -> None:
    numels = unit_order.numels_of_units()
    for rank, forwards in enumerate(attempt.run(probe_order, numels, per_rank=Draw(attempt).per_rank)):
        for number, (events, records) in list(enumerate(zip(forwards, _RECORDED, strict=True), 1))[1:]:
            context = f"prefetch=1, forward {number}, {'with' if records else 'without'} gradients"
            unit_order.judge_step(rank, events, len(numels), 1, context, phases=("forward",))


@dataclass
class Rejected:
    error: str | None = None  # the type of the error, or None if there was none
    message: str = ""
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # after a normal step


def probe_second_backward(wrapper, plan: UnitPlan, seed: int, x, y) -> Rejected:
    """Run two forwards, two backwards without finish between them, then a normal step."""
    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    losses = [awkward.loss_of(wrapped, x, y) for _ in range(2)]
    losses[0].backward()
    try:
        losses[1].backward()
    except Exception as error:
        found = Rejected(type(error).__name__, str(error))
    else:
        return Rejected()
    del losses
    wrapped.finish_gradient_sync()
    module.zero_grad()
    take_step(wrapped, optimizer, plan, x, y)
    with torch.no_grad():
        _, found.state = read_state(lambda: wrapped(x))
    return found


def a_second_backward_is_rejected(attempt: Attempt) -> None:
    plan, draw = UnitPlan("Blocks"), Draw(attempt)
    found = attempt.run(probe_second_backward, plan, per_rank=draw.per_rank)
    for rank, result in enumerate(found):
        if result.error is None:
            evidence = (
                "a second backward() without finish_gradient_sync() in between is accepted; expected a RuntimeError"
            )
            raise Wrong(
                {rank: evidence}, "Hint: what happens to a second gradient when the first one is already packed?"
            )
        if result.error != "RuntimeError" or "finish_gradient_sync" not in result.message:
            evidence = f"a second backward() raises {result.error}({result.message[:80]!r})"
            raise Wrong({rank: f"{evidence}; expected a RuntimeError that names finish_gradient_sync()"})
    alone = plain(plan, plan.build(draw.seeds[0]))
    before = awkward.state_of(alone.module)
    alone.step(0, draw.x, draw.y)
    states = {rank: result.state for rank, result in enumerate(found)}
    reject_missing(states, alone.steps[0].state, "after a rejected backward()")
    evidence = "after a rejected backward(), finish_gradient_sync() and a normal step"
    starts = dict.fromkeys(states, before)
    judge_states(states, alone.steps[0].state, starts, evidence, hint="Hint: what must finish_gradient_sync() reset?")


def probe_unsharded(wrapper, seed: int, x, y) -> dict[str, int]:
    """Return the bytes of unsharded parameters after finish_gradient_sync(), by unit. The first unit gets the data."""
    torch.manual_seed(seed)
    first, last = nn.Linear(x.shape[1], 8), nn.Linear(8, y.shape[1])
    module = nn.Sequential(first, nn.GELU(), last).double().to(device_here())
    wrapped = wrapper(module, units=[first, last], prefetch=0)
    kept = {"the first unit": [*first.parameters()], "the last unit": [*last.parameters()]}
    F.mse_loss(wrapped(x.to(device_here())), y.to(device_here())).backward()
    wrapped.finish_gradient_sync()
    return {name: sum(p.nbytes for p in unit if has_memory(p)) for name, unit in kept.items()}


def nothing_stays_unsharded(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_unsharded, per_rank=Draw(attempt).per_rank)):
        for unit, held_bytes in result.items():
            if held_bytes:
                evidence = f"after finish_gradient_sync(), {unit} of two still has {held_bytes:,} bytes of parameters"
                hint = "Its inputs are data, without a gradient. Hint: which hook does autograd not call for it?"
                raise Wrong({rank: f"{evidence}; expected 0"}, hint)


def probe_skipped(wrapper, plan: UnitPlan, finishes: bool, seed: int, x, y) -> dict[str, torch.Tensor]:
    """Run a forward whose output is not used, then a step. Return the state after it.

    Args:
        plan: What is trained, and how.
        finishes: Whether to call finish_gradient_sync() in between, while the output still exists.
        seed: For the model.
    """
    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    output = wrapped(x)
    if finishes:
        wrapped.finish_gradient_sync()
    else:
        del output
    take_step(wrapped, optimizer, plan, x, y)
    with torch.no_grad():
        return read_state(lambda: wrapped(x))[1]


def a_batch_may_be_skipped(attempt: Attempt) -> None:
    """Skip a batch, as training loops do if a loss is not finite. The next step uses parameters on one rank only."""
    for finishes in (True, False):
        plan, draw = UnitPlan("Branches", options={"prefetch": 0}), Draw(attempt)
        context = f"{plan}: a forward whose output is not used, {'finish_gradient_sync(), ' * finishes}and a step"
        found = attempt.run(probe_skipped, plan, finishes, per_rank=draw.per_rank, context=context)
        alone = plain(plan, plan.build(draw.seeds[0]))
        before = awkward.state_of(alone.module)
        alone.step(0, draw.x, draw.y)
        states = dict(enumerate(found))
        reject_missing(states, alone.steps[0].state, context)
        hint = "Hint: which forward calls are still recorded as open, although backward will never reach them?"
        judge_states(states, alone.steps[0].state, dict.fromkeys(states, before), context, hint=hint)


def _two_forwards(wrapped, x, y) -> torch.Tensor:
    """Run a forward whose graph is dropped, then two forwards. Return the loss of the two."""
    wrapped(x)
    one, two = (awkward.loss_of(wrapped, *half) for half in zip(x.chunk(2), y.chunk(2), strict=True))
    return (one + two) / 2


def probe_two_forwards(wrapper, plan: UnitPlan, seed: int, x, y) -> dict[str, torch.Tensor]:
    """Run a forward that fails, two that share a backward, and one before the step. Return the state after it."""
    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    with contextlib.suppress(RuntimeError):
        wrapped(x[:, 1:])
    _two_forwards(wrapped, x, y).backward()
    wrapped.finish_gradient_sync()
    wrapped(x)  # for example, to log its output
    optimizer.step()
    with torch.no_grad():
        return read_state(lambda: wrapped(x))[1]


def two_forwards_may_share_a_backward(attempt: Attempt) -> None:
    for model in ("Turns", "Tied"):
        plan, draw = UnitPlan(model), Draw(attempt)
        context = (
            f"{plan}: two forwards and one backward() of both, then a forward whose output is not used, and a step"
        )
        found = attempt.run(probe_two_forwards, plan, per_rank=draw.per_rank, context=context)
        alone = unit_models.build(model, draw.seeds[0])
        optimizer, before = new_optimizer(plan, alone), awkward.state_of(alone)
        halves = [torch.cat(each) for each in zip(*(x.chunk(2) for x, _ in draw.shares), strict=True)]
        targets = [torch.cat(each) for each in zip(*(y.chunk(2) for _, y in draw.shares), strict=True)]
        _two_forwards(alone, torch.cat(halves), torch.cat(targets)).backward()
        optimizer.step()
        expected, states = awkward.state_of(alone), dict(enumerate(found))
        reject_missing(states, expected, context)
        hint = "Hint: when has backward finished with a unit that was called in both forwards?"
        judge_states(states, expected, dict.fromkeys(states, before), context, hint=hint)
