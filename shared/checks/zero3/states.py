"""Judge forward alone: its values, and the state of every unit during and after it.

A ZeRO3 whose units are written differently is judged by its backward alone.
"""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded import unit_forward
from shared.checks.engine.sharded.unit_training import UnitPlan, has_memory, shard
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.models.unit_blocks import WIDTH
from shared.checks.zero3.backward import units_are_unsharded_when_they_compute

# -- judge forward alone: its values, and that each unit is unsharded while it computes and resharded afterwards


MODELS = ("Blocks", "Tied", "Frozen", "Few", "Mixed", "Buffered", "Nested", "Twice", "Checkpointed", "Bundles", "Whole")
MODELS += ("Dropped",)


def a_plain_model_computes(attempt: Attempt) -> None:
    units_are_unsharded_when_they_compute(attempt)
    unit_forward.judge_outputs(attempt, UnitPlan("Blocks", options={"prefetch": 0}))


def outputs_equal_one_process(attempt: Attempt) -> None:
    units_are_unsharded_when_they_compute(attempt)
    for model in MODELS if attempt.world_size == 2 else attempt.random.sample(MODELS, 3):
        unit_forward.judge_outputs(attempt, UnitPlan(model))


def parameters_are_shards(attempt: Attempt) -> None:
    for model in ("Blocks", "Mixed", "Few"):
        plan, draw = UnitPlan(model), Draw(attempt)
        found = attempt.run(unit_forward.probe_forward, plan, (False,), per_rank=draw.per_rank, context=str(plan))
        elements = sum(p.numel() for p in unit_models.build(model, 0).parameters())
        padding = 8 * (attempt.world_size - 1)  # at most eight flat tensors
        owned = [result["owned"] for result in found]
        if not elements <= sum(owned) <= elements + padding or max(owned) > (elements + padding) / attempt.world_size:
            evidence = (
                f"{plan}: parameters() has {owned} elements on the ranks; expected about equal shares of the "
                f"model's {elements}"
            )
            raise Wrong(evidence, "Hint: which tensors should the optimizer get from parameters()?")


def each_unit_is_gathered_once(attempt: Attempt) -> None:
    for model in ("Blocks", "Mixed", "Frozen", "Whole"):
        unit_forward.judge_forward_wire(attempt, UnitPlan(model))


def only_computing_units_are_unsharded(attempt: Attempt) -> None:
    """Try a model with a small root, and one whose root is large enough to show."""
    for model, more in (("Deep", {}), ("Deep", {"reshard_after_forward": False}), ("DeepWhole", {})):
        unit_forward.judge_forward_memory(attempt, UnitPlan(model, dtype=torch.float32, options={"prefetch": 0} | more))


_HINT_ON_STATES = "Hint: which unit's parameters does backward need first, and which ones can be freed until then?"
_HINT_ON_CALLS = "Hint: for which units, and when, must _watch_outputs() be called?"
_HINT_ON_BACKWARD = "Hint: activation checkpointing repeats a forward during backward. What may that forward do?"


def _observe(units: list) -> list[tuple[str, int]]:
    """Return, for each unit, the name of its state and its number of open calls."""
    return [(unit.state.name, len(unit.open_calls)) for unit in units]


def probe_states(wrapper, plan: UnitPlan, seed: int, x, y) -> dict[str, list[tuple[str, int]]] | None:
    """Run a forward without gradients, with gradients, and in BACKWARD. Return every unit's state at each moment."""
    module = unit_models.build(plan.model, seed).to(device_here())
    wrapped, x = shard(wrapper, module, plan), x.to(device_here())
    units = list(getattr(wrapped, "units", []))
    if not all(hasattr(unit, "state") and hasattr(unit, "open_calls") for unit in units) or not units:
        return None
    with torch.no_grad():
        wrapped(x)
    found = {"without gradients": _observe(units)}
    output = wrapped(x)
    found["with gradients"] = _observe(units)
    first = units[0]
    first.wait_for_unshard()
    first.state = type(first.state).BACKWARD
    again = module.blocks[0](x.new_zeros(2, WIDTH))
    has_parameters = all(has_memory(each) for each in module.blocks[0].parameters())
    found["while its unit is in BACKWARD"] = [*_observe(units[:1]), ("unsharded" if has_parameters else "freed", 0)]
    del output, again
    return found


def forward_leaves_what_backward_needs(attempt: Attempt) -> None:
    units_are_unsharded_when_they_compute(attempt)
    calls = {"Blocks": [1, 1, 1], "Twice": [2, 2, 1]}
    for model, kept in (("Blocks", False), ("Blocks", True), ("Twice", False)):
        plan = UnitPlan(model, options={"prefetch": 0, "reshard_after_forward": not kept})
        found = attempt.run(probe_states, plan, per_rank=Draw(attempt).per_rank, context=str(plan))
        blocks = "UNSHARDED" if kept else "SHARDED"
        expected = {
            "without gradients": [("SHARDED", 0)] * 4,
            "with gradients": [*((blocks, each) for each in calls[model]), ("UNSHARDED", 1)],
            "while its unit is in BACKWARD": [("BACKWARD", calls[model][0]), ("unsharded", 0)],
        }
        for rank, result in enumerate(found):
            for moment, states in expected.items() if result else ():
                _judge(rank, f"{plan}, after a forward {moment}", result[moment], states)


def _judge(rank: int, context: str, found: list[tuple[str, int]], expected: list[tuple[str, int]]) -> None:
    in_backward = "in BACKWARD" in context
    for index, ((state, calls), (its_state, its_calls)) in enumerate(zip(found, expected, strict=True)):
        which = "the root" if index == 3 else f"block {0 if in_backward else index}"
        if state != its_state:
            hint = _HINT_ON_BACKWARD if in_backward else _HINT_ON_STATES
            raise Wrong({rank: f"{context}: {which} is {state}; expected {its_state}"}, hint)
        if calls != its_calls:
            hint = _HINT_ON_BACKWARD if in_backward else _HINT_ON_CALLS
            raise Wrong({rank: f"{context}: {which} has {calls} open calls; expected {its_calls}"}, hint)
