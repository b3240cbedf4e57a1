"""Judge forward alone: its values, and that each unit is unsharded while it computes and resharded afterwards."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded import unit_forward
from shared.checks.engine.sharded.unit_training import UnitPlan
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.zero3.hooks import units_are_unsharded_when_they_compute

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
