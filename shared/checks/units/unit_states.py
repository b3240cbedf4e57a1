"""Judge in which state the units of PlainZeRO3 are: while they compute, and after forward and backward.

A PlainZeRO3 whose units are written differently is judged by its values, its memory and its backward alone.
"""

from dataclasses import dataclass
from functools import partial

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.unit_training import UnitPlan, shard
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models

_PLAN = UnitPlan("Blocks")
_NAMES = ["block 0", "block 1", "block 2", "the root"]
_READABLE = ("UNSHARDED", "BACKWARD")


def _build(wrapper, plan: UnitPlan, seed: int) -> tuple:
    """Return the wrapped model, the modules that are units, and their units; no units if they have no states."""
    module = unit_models.build(plan.model, seed).to(device_here())
    wrapped = shard(wrapper, module, plan)
    units = list(getattr(wrapped, "units", []))
    return wrapped, [*module.blocks, module], units if all(hasattr(unit, "state") for unit in units) else []


def probe_after_forward(wrapper, plan: UnitPlan, seed: int, x, y) -> dict[str, list[str]] | None:
    """Run a forward without gradients and one with gradients. Return the state of every unit after each."""
    wrapped, _, units = _build(wrapper, plan, seed)
    x, found = x.to(device_here()), {}
    if not units:
        return None
    for how in ("without gradients", "with gradients"):
        with torch.set_grad_enabled(how == "with gradients"):
            output = wrapped(x)
        found[how] = [unit.state.name for unit in units]
        del output
    return found


def blocks_are_sharded_and_the_root_stays(attempt: Attempt) -> None:
    found = attempt.run(probe_after_forward, _PLAN, per_rank=Draw(attempt).per_rank, context=str(_PLAN))
    expected = {"without gradients": ["SHARDED"] * 4, "with gradients": ["SHARDED"] * 3 + ["UNSHARDED"]}
    for rank, result in enumerate(found):
        for how, states in expected.items() if result else ():
            for name, actual, wanted in zip(_NAMES, result[how], states, strict=True):
                if actual != wanted:
                    evidence = f"{_PLAN}, after a forward {how}: {name} is {actual}; expected {wanted}"
                    hint = "Hint: which unit's parameters does backward need first? And if there is no backward?"
                    raise Wrong({rank: evidence}, hint)


@dataclass
class InUse:
    """The states of units."""

    computing: list[tuple[str, int, str]]  # whenever one computes: the phase, the unit's index and its state
    at_the_end: list[str]


def probe_in_use(wrapper, plan: UnitPlan, trains: bool, seed: int, x, y) -> InUse | None:
    """Run forward, and backward if `trains`. Return the state of each unit whenever it computes, and at the end.

    A unit that cannot be read then is unsharded here, because reading it could crash this process.
    """
    wrapped, submodules, units = _build(wrapper, plan, seed)
    in_use: list[tuple[str, int, str]] = []

    def note(phase: str, index: int) -> None:
        in_use.append((phase, index, units[index].state.name))
        units[index].wait_for_unshard()

    def note_backward(index: int, _module, _inputs, output) -> None:
        if trains:
            output.register_hook(lambda _gradient: note("backward", index))

    if not units:
        return None
    for index, submodule in enumerate(submodules):  # these hooks run after the wrapper's own
        submodule.register_forward_pre_hook(lambda *_, index=index: note("forward", index))
        submodule.register_forward_hook(partial(note_backward, index))
    loss = awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here()))
    if trains:
        loss.backward()
    return InUse(in_use, [unit.state.name for unit in units])


def judge_in_use(attempt: Attempt, trains: bool) -> None:
    """Check that units are unsharded when they compute, and sharded after backward if there is one.

    Raises:
        Wrong: If one is not.
    """
    for rank, result in enumerate(attempt.run(probe_in_use, _PLAN, trains, per_rank=Draw(attempt).per_rank)):
        for phase, index, state in result.computing if result else ():
            if state not in _READABLE:
                evidence = f"{_PLAN}: when {phase} reaches {_NAMES[index]}, it is {state}; expected UNSHARDED"
                raise Wrong({rank: evidence}, "Hint: which hook must wait for it, and is that hook called?")
        for name, state in zip(_NAMES, result.at_the_end, strict=True) if result and trains else ():
            if state != "SHARDED":
                evidence = f"{_PLAN}, after backward() and before finish_gradient_sync(): {name} is {state}"
                hint = "Hint: for which units does the table say that post_backward() reshards them?"
                raise Wrong({rank: f"{evidence}; expected SHARDED"}, hint)


@dataclass
class Hooked:
    called: list[bool]  # for each unit, whether pre_backward() was called for it
    others: list[str]  # the types of other things that it was called with instead of a unit
    with_gradients: bool  # whether it was always called with a gradient


def probe_hooks(wrapper, plan: UnitPlan, seed: int, x, y) -> Hooked | None:
    """Run forward and backward with a pre_backward() that only notes its calls."""
    called, gradients = [], []
    if not hasattr(wrapper, "pre_backward"):
        return None

    class Noting(wrapper):
        def pre_backward(self, unit, gradient=None) -> None:
            called.append(unit)
            gradients.append(gradient)

        def on_gradient(self, *_) -> None:
            pass

    wrapped, _, units = _build(Noting, plan, seed)
    if not units:
        return None
    loss = awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here()))
    for unit in units:
        unit.wait_for_unshard()  # nothing else does that in this backward
    loss.backward()
    others = {type(each).__name__ for each in called if not any(each is unit for unit in units)}
    return Hooked(
        [any(each is unit for each in called) for unit in units],
        sorted(others),
        with_gradients=all(isinstance(each, torch.Tensor) for each in gradients),
    )


def backward_will_find_its_hooks(attempt: Attempt) -> None:
    """Check that post_forward() registers pre_backward() for every unit, and passes the gradient on."""
    for rank, result in enumerate(attempt.run(probe_hooks, _PLAN, per_rank=Draw(attempt).per_rank)):
        if result and result.others:
            evidence = f"{_PLAN}: backward calls pre_backward() with a {' and a '.join(result.others)}"
            hint = "Hint: which of its arguments is bound when you register it?"
            raise Wrong({rank: f"{evidence}; expected the Unit"}, hint)
        called = result.called if result else ()
        missing = [name for name, was_called in zip(_NAMES, called, strict=False) if not was_called]
        if missing:
            evidence = f"{_PLAN}: backward never calls pre_backward() for {', '.join(missing)}"
            hint = "Hint: how does autograd know that it should call pre_backward()?"
            if missing == _NAMES[-1:]:
                hint = "Hint: for which units does post_forward() register it?"
            raise Wrong({rank: evidence}, hint)
        if result and not result.with_gradients:
            evidence = f"{_PLAN}: backward calls pre_backward() without the gradient"
            evidence = f"{evidence}; expected the Unit and the gradient"
            raise Wrong({rank: evidence}, "Hint: what does autograd pass to the function that you register?")
