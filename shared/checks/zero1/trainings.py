"""Judge trainings that ZeRO1 and the ShardedOptimizer inside it must both pass."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.plan import Plan, layout_of
from shared.checks.engine.sharded.training import probe_sharded, train_and_judge
from shared.checks.models import awkward


def a_plain_model_trains_as_in_one_process(attempt: Attempt, probe=probe_sharded) -> None:
    for optimizer in ("SGD", "AdamW"):
        train_and_judge(attempt, Plan("Plain", optimizer), probe)


def ranks_start_equal(attempt: Attempt, probe=probe_sharded) -> None:
    for model in ("Frozen", "Mixed"):
        found = train_and_judge(attempt, Plan(model, steps=0), probe)
        states = {rank: result["start"] for rank, result in found.items()}
        for rank, state in states.items():
            for name, expected in states[0].items():
                if not torch.equal(state[name], expected):
                    hint = "Hint: which parameters does the model use although the optimizer never updates them?"
                    evidence = f"{awkward.describe(model)}: before the first step, {name} differs from rank 0's"
                    raise Wrong({rank: evidence}, hint if (model, name) == ("Frozen", "first.bias") else "")


def each_parameter_is_broadcast_once(attempt: Attempt, probe=probe_sharded) -> None:
    for plan in (Plan("Frozen", steps=0), Plan("Mixed", steps=0, split=True)):
        judge_building(train_and_judge(attempt, plan, probe), plan)


def judge_building(found: dict[int, dict], plan: Plan) -> None:
    """Check that the constructor sends each parameter at most once.

    Raises:
        Wrong: If it sends more bytes.
    """
    frozen = sum(p.nbytes for p in awkward.build(plan.model, 0).parameters() if not p.requires_grad)
    most = frozen + sum(flat.filled_bytes(len(found)) for flat in layout_of(plan))
    for rank, result in found.items():
        if sum(call.payload_bytes for call in result["building"]) > most:
            sent = describe_calls(result["building"])
            evidence = f"{plan}, in the constructor: {sent}; expected at most {most} bytes"
            raise Wrong({rank: evidence}, "Hint: how many times is each parameter sent?")


def each_group_has_settings_of_its_own(attempt: Attempt, probe=probe_sharded) -> None:
    train_and_judge(attempt, Plan("Mixed", "Adam", split=True, scheduler="ExponentialLR"), probe)
    for optimizer in ("AdamW", "SGD"):
        try:
            train_and_judge(attempt, Plan("Tied", optimizer, split=True, scheduler="OneCycleLR"), probe)
        except Wrong as wrong:
            if "must support momentum" in wrong.evidence:  # OneCycleLR raises this if it finds no betas.
                wrong.hint = "Hint: which default settings does the inner optimizer have that the caller did not pass?"
            raise


def parameters_may_join_later(attempt: Attempt, probe=probe_sharded) -> None:
    """Add a parameter of three elements, fewer than there are ranks."""
    for split in (False, True):
        train_and_judge(attempt, Plan("Frozen", split=split, late=True), probe)


def it_stays_inside_its_group(attempt: Attempt, probe=probe_sharded) -> None:
    train_and_judge(attempt, Plan("Tied", in_subgroup=True), probe)
    train_and_judge(attempt, Plan("Frozen", "SGD", in_subgroup=True, split=True), probe)
