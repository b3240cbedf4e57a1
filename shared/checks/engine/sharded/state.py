"""Check a sharded optimizer's state_dict(): it must equal a plain optimizer's, and load on any number of ranks."""

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from shared import memory, ranks, wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import tolerance_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.rejections import error_of, judge_errors
from shared.checks.engine.sharded.plan import Plan, Run, RunStep
from shared.checks.engine.sharded.state_dicts import judge_state_dict, same
from shared.checks.engine.sharded.training import alone, begin, judge_states
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

MEMORY_MODEL = "Large"
_HINT_ON_LOADING = (
    "Hint: which state and settings does the inner optimizer get? And is it the state of this rank's shard?"
)


@dataclass
class Saved:
    state: Any  # what state_dict() returned
    module: dict[str, torch.Tensor]  # the module's state when the optimizer was saved
    after: dict[str, torch.Tensor]  # the module's state one step later


def probe_save(sharded, plan: Plan, to: int | None, seed: int, x, y) -> Saved | None:
    """Train, save, and take one more step. Returns None on a rank that does not take part."""
    group, member = join_subgroup(plan.in_subgroup)
    if not member:
        return None
    run = begin(sharded, plan, awkward.build(plan.model, seed).to(device_here()), group)
    x, y = x.to(device_here()), y.to(device_here())
    run.train(x, y)
    saved = run.optimizer.state_dict() if to is None else run.optimizer.state_dict(to=to)
    saved, before = copy.deepcopy(saved), awkward.state_of(run.module)
    run.step(1, x, y)
    return Saved(saved, before, awkward.state_of(run.module))


@dataclass
class Continued:
    steps: list[RunStep]
    left_alone: bool  # whether load_state_dict() has not changed its argument


def probe_load(sharded, plan: Plan, used: bool, module_state: dict, saved: dict, x, y) -> Continued | None:
    """Continue training from a saved state. Returns None on a rank that does not take part.

    Args:
        sharded: The student's class.
        plan: How to train.
        used: Whether to load into an optimizer that has already taken a step.
        module_state: The module's state.
        saved: The optimizer's state.
        x: The inputs.
        y: The targets.
    """
    group, member = join_subgroup(plan.in_subgroup)
    if not member:
        return None
    x, y, given = x.to(device_here()), y.to(device_here()), copy.deepcopy(saved)
    module = awkward.build(plan.model, 0).to(device_here())
    if used:
        run = begin(sharded, plan, module, group)
        run.step(0, x, y)
        run.steps.clear()
        run.optimizer.zero_grad()
        run.optimizer.load_state_dict(given)
    module.load_state_dict(module_state)
    if not used:
        run = begin(sharded, plan, module, group, loaded=given)
    run.train(x, y)
    return Continued(run.steps, same(given, saved))


def _save(attempt: Attempt, plan: Plan, to: int | None = None) -> tuple[dict[int, Saved], Run]:
    """Train and save on fresh data. Returns what the probe found, by global rank, and the plain optimizer's run.

    Raises:
        Wrong: If the saved state differs from a plain optimizer's, or training cannot continue correctly.
    """
    draw = Draw(attempt)
    members = members_of(attempt, plan.in_subgroup)
    context = f"{called_alone(attempt)}, {plan}" if plan.in_subgroup else str(plan)
    results = attempt.run(probe_save, plan, to, per_rank=draw.per_rank, context=context)
    found = {rank: results[rank] for rank in members}
    x, y = draw.samples_of(members)
    reference = alone(plan, awkward.build(plan.model, draw.seeds[members[0]]), x, y)
    expected = copy.deepcopy(reference.optimizer.state_dict())
    message, tolerance = f"{context}, after {plan.steps} steps", tolerance_of(reference.module.parameters())
    for index, (rank, result) in enumerate(found.items()):
        if to not in (None, index):
            if result.state is not None:
                evidence = f"state_dict(to={to}) returned a {type(result.state).__name__} on the group's rank {index}"
                raise Wrong({rank: f"{message}: {evidence}; expected None"}, "Hint: which rank does `to` name?")
            continue
        judge_state_dict(rank, result.state, expected, tolerance, message)
    reference.step(1, x, y)
    states = {rank: each.after for rank, each in found.items()}
    before = {rank: each.module for rank, each in found.items()}
    message = f"{message}, and one more after state_dict()"
    judge_states(
        states,
        reference.steps[-1].state,
        before,
        message,
        hint="Hint: what does state_dict() change in the optimizer itself?",
    )
    return found, reference


def _load(attempt: Attempt, plan: Plan, module_state: dict, saved: dict, context: str, used: bool = False) -> None:
    """Continue training from a saved state, on fresh data.

    Raises:
        Wrong: If a plain optimizer continues differently from that state.
    """
    draw = Draw(attempt)
    members = members_of(attempt, plan.in_subgroup)
    context = f"{context} into an optimizer that has already stepped" if used else context
    context = f"{context}, {called_alone(attempt)}" if plan.in_subgroup else context
    share = [(module_state, saved, *each) for each in draw.shares]
    results = attempt.run(probe_load, plan, used, per_rank=share, context=f"{plan}, {context}")
    found = {rank: results[rank] for rank in members}
    module = awkward.build(plan.model, 0)
    module.load_state_dict(module_state)
    reference = alone(plan, module, *draw.samples_of(members), loaded=copy.deepcopy(saved))
    for number, expected in enumerate(reference.steps):
        states = {rank: each.steps[number].state for rank, each in found.items()}
        before = {rank: each.steps[number - 1].state if number else module_state for rank, each in found.items()}
        message = f"{plan}, {context}, step {number + 1} after loading"
        judge_states(states, expected.state, before, message, hint=_HINT_ON_LOADING)
    changed = {rank: f"{plan}, {context}: the caller's state dict was changed" for rank in found}
    if not all(each.left_alone for each in found.values()):
        hint = "load_state_dict() must not change its argument. Hint: whose memory does the optimizer update?"
        raise Wrong(changed, hint)


def it_is_a_plain_state(attempt: Attempt) -> None:
    plans = [
        Plan("Tied", "AdamW", split=True, scheduler="OneCycleLR"),
        Plan("Mixed", "UnknownOptimizer"),
        Plan("Frozen", "SGD"),
    ]
    plans += [
        Plan("Crowd", "Adam"),
        Plan("Unused", "AdamW", late=True),
        Plan("Scalar", "UnknownOptimizer"),
    ]
    for plan in plans if attempt.world_size == 2 else attempt.random.sample(plans, 2):
        _save(attempt, replace(plan, steps=3))


def before_the_first_step(attempt: Attempt) -> None:
    for plan in (Plan("Plain", "AdamW", steps=0), Plan("Mixed", "SGD", steps=0, split=True)):
        found, _ = _save(attempt, plan)
        after, message = replace(plan, steps=2), "saved before the first step and loaded"
        _load(attempt, after, found[0].module, found[0].state, message, used=plan.split)


def one_rank_alone_may_have_it(attempt: Attempt) -> None:
    for to in (0, 1) if attempt.world_size == 2 else (attempt.world_size - 1,):
        try:
            _save(attempt, Plan("Frozen", "AdamW", steps=2, split=True), to)
        except Wrong as wrong:
            if wrong.hangs:
                wrong.hint = (
                    "Each rank must take part in every entry's gather. Hint: which entries does a rank skip after "
                    "gather_shards() has returned None?"
                )
            raise
    if attempt.world_size in SUBGROUPS:
        _save(attempt, Plan("Tied", "Adam", steps=2, in_subgroup=True), attempt.random.randrange(2))


@contextlib.contextmanager
def in_world_of(attempt: Attempt, size: int):
    """Make the first `size` ranks the world for a while. Yields an attempt on them."""
    ranks.current().regroup(list(range(size)))
    try:
        yield replace(attempt, world_size=size)
    finally:
        if ranks.current().alive:
            ranks.current().regroup(list(range(attempt.world_size)))


def another_number_of_ranks_goes_on(attempt: Attempt) -> None:
    """A plain optimizer in one process must be able to continue, too, with settings that a scheduler has changed."""
    plans = (Plan("Mixed", "AdamW", split=True, scheduler="ExponentialLR"), Plan("Frozen", "UnknownOptimizer"))
    for plan in plans:
        found, _ = _save(attempt, replace(plan, steps=3))
        module_state, saved = found[0].module, found[0].state
        after = replace(plan, steps=2, scheduler="")
        _go_on_alone(attempt, after, module_state, saved)
        in_subgroup, message = replace(after, in_subgroup=True), f"saved on {attempt.world_size} ranks and loaded"
        _load(attempt, in_subgroup, module_state, saved, message)
        for size in range(1, attempt.world_size):
            with in_world_of(attempt, size) as smaller:
                message = f"saved on {attempt.world_size} ranks and loaded on {size}"
                _load(smaller, after, module_state, saved, message)


def _go_on_alone(attempt: Attempt, plan: Plan, module_state: dict, saved: dict) -> None:
    """Continue with a plain optimizer. A step counter that parameters share would be incremented once per parameter."""
    draw, states = Draw(attempt), []
    apart = copy.deepcopy({"state": {}, "param_groups": saved["param_groups"]})
    apart["state"] = {number: copy.deepcopy(state) for number, state in saved["state"].items()}
    for each in (copy.deepcopy(saved), apart):
        module = awkward.build(plan.model, 0)
        module.load_state_dict(module_state)
        states.append(alone(plan, module, draw.x, draw.y, loaded=each).steps[-1].state)
    message = f"{plan}, saved on {attempt.world_size} ranks and loaded by a plain optimizer"
    for name, expected in states[1].items():
        if not torch.equal(states[0][name], expected):
            raise Wrong(
                f"{message}: {name} is updated incorrectly", "Hint: do several parameters share a tensor in this state?"
            )


def a_plain_state_is_taken_over(attempt: Attempt) -> None:
    """A plain optimizer has no state for a parameter that never had a gradient. Schedulers must continue."""
    for plan in (Plan("Unused", "AdamW"), Plan("Mixed", "Adam", split=True, scheduler="OneCycleLR")):
        draw = Draw(attempt)
        plain = alone(replace(plan, steps=3, fill=False), awkward.build(plan.model, draw.seeds[0]), draw.x, draw.y)
        saved = copy.deepcopy(plain.optimizer.state_dict())
        after, message = replace(plan, steps=3, scheduler="ExponentialLR"), "the state of a plain optimizer loaded"
        _load(attempt, after, awkward.state_of(plain.module), saved, message)
        _load(attempt, replace(after, scheduler=""), awkward.state_of(plain.module), saved, message, used=True)
    _first_parameter_without_state(attempt)


def _first_parameter_without_state(attempt: Attempt) -> None:
    """Use SGD, which has no step count: the momentum of a parameter without state begins at zero, sharded or not."""
    plan, draw = Plan("Plain", "SGD", steps=2), Draw(attempt)
    plain = alone(plan, awkward.build(plan.model, draw.seeds[0]), draw.x, draw.y)
    saved = copy.deepcopy(plain.optimizer.state_dict())
    del saved["state"][0]
    message = "the state of a plain optimizer loaded, without entries for the first parameter"
    _load(attempt, plan, awkward.state_of(plain.module), saved, message)


def probe_foreign(sharded, saved: dict) -> tuple[str, str]:
    """Return the error that loading a state raises."""
    run = begin(sharded, Plan("Plain"), awkward.build("Plain", 0).to(device_here()))
    return error_of(lambda: run.optimizer.load_state_dict(saved))


def foreign_states_are_rejected(attempt: Attempt) -> None:
    ours = [p.shape for p in awkward.build("Plain", 0).parameters()]
    tried = {
        "with more parameters": ([*ours, (2,)], 1),
        "with two param groups instead of one": (ours, 2),
        "with parameters of other sizes": ([(5, 6), (5,), (3, 5), (3,)], 1),
        "with transposed parameters": ([shape[::-1] for shape in ours], 1),
    }
    for what, (shapes, groups) in tried.items():
        parameters = [torch.nn.Parameter(torch.ones(tuple(shape), dtype=torch.float64)) for shape in shapes]
        params = [{"params": parameters[:2]}, {"params": parameters[2:]}] if groups == 2 else parameters
        optimizer = torch.optim.AdamW(params)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        errors = attempt.run(probe_foreign, optimizer.state_dict())
        hint = "Hint: what must a parameter and its state have in common?"
        judge_errors(errors, f"loading a state {what}", "ValueError", hint=hint)


@dataclass
class Cost:
    extra_bytes: int  # at the peak
    sent_bytes: float


def probe_cost(sharded, seed: int, x, y) -> dict[int | None, Cost]:
    """Return the costs of state_dict(to=None) and state_dict(to=0)."""
    module = awkward.build(MEMORY_MODEL, seed, torch.float32).to(device_here())
    run = begin(sharded, Plan(MEMORY_MODEL, "AdamW", dtype=torch.float32), module)
    run.step(0, x.to(device_here(), torch.float32), y.to(device_here(), torch.float32))
    found = {}
    for to in (None, 0):
        with memory.peak(module, run.optimizer) as peak, instrumentation.listening() as calls:
            run.optimizer.state_dict(to=to)
        totals = [sample.held.total_bytes for sample in peak.samples]
        sent = sum(wire.sent_bytes_of(call, torch.distributed.get_rank()) for call in calls)
        found[to] = Cost(max(totals) - totals[0], sent)
    return found


def nobody_else_holds_it(attempt: Attempt) -> None:
    numel = sum(p.numel() for p in awkward.build(MEMORY_MODEL, 0).parameters())
    shard_bytes = 4 * numel / attempt.world_size
    for rank, result in enumerate(attempt.run(probe_cost, per_rank=Draw(attempt).per_rank)):
        for to, rounds in ((None, attempt.world_size - 1), (0, 1)):
            most, sent = 2 * rounds * shard_bytes * 1.01, result[to].sent_bytes
            if (rank or to is None) and sent > most:
                message = f"in state_dict(to={to}), this rank sends {sent:,.0f} bytes; expected at most {most:,.0f}"
                raise Wrong({rank: message}, "Hint: which rank needs which shards?")
        if rank and result[0].extra_bytes > 3.1 * shard_bytes:  # Adam's two states, and one shard being sent
            message = (
                f"in state_dict(to=0), this rank allocates {result[0].extra_bytes:,} bytes; "
                f"expected at most 3 shards of {shard_bytes:,.0f} bytes"
            )
            raise Wrong({rank: message}, "Hint: how much memory does a rank need if it only sends?")
