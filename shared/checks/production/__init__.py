"""Checks for chapter 11: torch's fully_shard, hybrid sharding, and choosing a strategy."""

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.models import awkward
from shared.checks.production import choice, training, wire
from shared.checks.production import mesh as production_mesh
from shared.checks.production.training import Sharding, train_and_judge

# A file may define any of these, because none builds on another.
fully_sharded = Exercise("11.1", "fully_sharded")
host_mesh = Exercise("11.2", "host_mesh")
choose_strategy = Exercise("11.3", "choose_strategy")

# torch's fully_shard rejects ties between units, two dtypes in a unit, and scalars, and it does not work if only some
# ranks use a parameter (torch 2.13).
MODELS = ("TiedInside", "Frozen", "FrozenNorms", "Buffered", "Nested", "Whole", "Bundles", "Checkpointed", "Twice")

_AT_ONCE = {"compute_dtype": torch.float32, "reduce_dtype": torch.float64, "reshard_after_forward": False}
_HINT_ON_NOTHING = "Hint: what does your search return if it finds nothing?"
_HINT_ON_BROADCAST = "Hint: should you broadcast values before or after the parameters become DTensors?"
_HINT_ON_ORDER = "Hint: which must be sharded first: a module, or the modules inside it?"
IN_SHARDING = {
    "Invariant encountered": _HINT_ON_ORDER,
    "mixed torch.Tensor and DTensor": _HINT_ON_ORDER,
    "has not sharded": "Hint: which call shards the parameters outside the units?",
    "must have the same dtype": "Hint: which of your fully_shard() calls receive the mixed-precision policy?",
    "broadcast_state(": _HINT_ON_BROADCAST,
    "c10d.broadcast_": _HINT_ON_BROADCAST,
}

# -- 11.1


fully_sharded.check("plain", world_sizes=(2,))(on_each(train_and_judge, Sharding("Blocks", steps=2)))


@fully_sharded.check("awkward models")
def awkward_models_train_as_in_one_process(attempt: Attempt) -> None:
    some = {1: 1, 2: 4, 3: 1, 4: 1}[attempt.world_size]
    always = {2: ("Buffered", "Frozen", *awkward.HAVE_MODES), 3: ("Buffered",)}.get(attempt.world_size, ())
    for model in dict.fromkeys((*always, *attempt.random.sample(MODELS, some))):
        options = {"reshard_after_forward": attempt.random.random() < 0.7}
        plan = Sharding(model, options=options, inner_first=attempt.random.random() < 0.5)
        train_and_judge(attempt, plan)


@fully_sharded.check("sharded", world_sizes=(2, 3, 4))
def each_rank_holds_its_rows(attempt: Attempt) -> None:
    for model in ("Blocks", "Nested") if attempt.world_size == 2 else ("Blocks",):
        train_and_judge(attempt, Sharding(model, steps=1))


@fully_sharded.check("wire", world_sizes=(2, 4))
def units_are_sent_one_by_one(attempt: Attempt) -> None:
    plans = [Sharding("Blocks", steps=2), Sharding("Whole", steps=1)]
    plans.append(Sharding("TiedInside", steps=1, options={"reshard_after_forward": False}))
    for plan in plans:
        wire.every_step_sends(attempt, plan)
    if attempt.world_size == 2:
        wire.frozen_units_are_gathered(attempt)


@fully_sharded.check("nested", world_sizes=(2, 3))
def units_may_be_nested(attempt: Attempt) -> None:
    for inner_first in (True, False) if attempt.world_size == 2 else (False,):
        wire.every_step_sends(attempt, Sharding("Nested", steps=2, inner_first=inner_first))
    wire.every_step_sends(attempt, Sharding("Nested", steps=1, options={"reshard_after_forward": False}))


@fully_sharded.check("dtypes", world_sizes=(3,))
def it_computes_and_reduces_in_other_dtypes(attempt: Attempt) -> None:
    """Use float64 and float32, so that values can be compared."""
    narrow, wide = torch.float32, torch.float64
    for options in (
        {"compute_dtype": narrow},
        {"compute_dtype": narrow, "reduce_dtype": wide},
        {"reduce_dtype": narrow},
    ):
        wire.every_step_sends(attempt, Sharding("Blocks", steps=2, options=options))
    wire.every_step_sends_in_bf16(attempt)


fully_sharded.check("memory", world_sizes=(4,))(training.one_unit_is_unsharded_at_a_time)


@fully_sharded.check("mesh")
def it_shards_over_its_mesh(attempt: Attempt) -> None:
    size = attempt.world_size
    for mesh in {1: [(1, 1)], 2: [(2,), (2, 1)], 3: [(1, 3)], 4: [(2, 2)]}[size]:
        plan = Sharding("Blocks", steps=2, mesh=mesh, options=_AT_ONCE if size == 4 else {})
        found = train_and_judge(attempt, plan)
        for rank, result in enumerate(found):
            wire.judge_wire(plan, rank, result.steps[-1].calls, size, str(plan))


fully_sharded.check("device", world_sizes=(2,))(production_mesh.the_default_is_on_the_modules_device)

# -- 11.2

host_mesh.check("mesh")(production_mesh.ranks_are_laid_out)
host_mesh.check("rejection", world_sizes=(2, 3, 4))(production_mesh.uneven_hosts_are_rejected)
host_mesh.check("wire", world_sizes=(2, 4))(production_mesh.only_gradients_leave_a_host)

# -- 11.3

choose_strategy.check("situations", world_sizes=(1,))(choice.the_five_situations)
choose_strategy.check("what fits", world_sizes=(1,))(choice.what_fits)
choose_strategy.check("what is fast", world_sizes=(1,))(choice.what_is_fast)
choose_strategy.check("micro-batch", world_sizes=(1,))(choice.larger_batches)

give_hints(IN_SHARDING, fully_sharded)
give_hints({"empty sequence": _HINT_ON_NOTHING, "empty iterable": _HINT_ON_NOTHING}, choose_strategy)
