"""Judge which units a forward of PlainZeRO3 leaves unsharded.

A PlainZeRO3 whose units are written differently is judged by its memory and its backward alone.
"""

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.unit_training import UnitPlan, shard
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models


def probe_states(wrapper, plan: UnitPlan, seed: int, x, y) -> dict[str, list[str]] | None:
    """Run a forward without gradients and one with gradients. Return the state of every unit after each."""
    module = unit_models.build(plan.model, seed).to(device_here())
    wrapped, x = shard(wrapper, module, plan), x.to(device_here())
    units, found = list(getattr(wrapped, "units", [])), {}
    if not all(hasattr(unit, "state") for unit in units) or not units:
        return None
    for how in ("without gradients", "with gradients"):
        with torch.set_grad_enabled(how == "with gradients"):
            output = wrapped(x)
        found[how] = [unit.state.name for unit in units]
        del output
    return found


def blocks_are_sharded_and_the_root_stays(attempt: Attempt) -> None:
    plan = UnitPlan("Blocks")
    found = attempt.run(probe_states, plan, per_rank=Draw(attempt).per_rank, context=str(plan))
    names = ["block 0", "block 1", "block 2", "the root"]
    expected = {"without gradients": ["SHARDED"] * 4, "with gradients": ["SHARDED"] * 3 + ["UNSHARDED"]}
    for rank, result in enumerate(found):
        for how, states in expected.items() if result else ():
            for name, actual, wanted in zip(names, result[how], states, strict=True):
                if actual != wanted:
                    evidence = f"{plan}, after a forward {how}: {name} is {actual}; expected {wanted}"
                    hint = "Hint: which unit's parameters does backward need first? And if there is no backward?"
                    raise Wrong({rank: evidence}, hint)
