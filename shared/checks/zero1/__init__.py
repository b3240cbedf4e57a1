"""Checks for chapter 07: an optimizer whose state is sharded over the ranks."""

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.framework import WORLD_SIZES, Exercise
from shared.checks.engine.hints import begin_at, give_hints, where_it_raises
from shared.checks.engine.sharded import clip, flat_layout
from shared.checks.engine.sharded import state as saved
from shared.checks.engine.sharded import steps as unusual
from shared.checks.engine.sharded.plan import Plan
from shared.checks.engine.sharded.training import judge_building, sends, starts_equal, trains
from shared.checks.zero1 import flat_gradients, memory
from shared.checks.zero1.on_shards import trains_on_shards

FlatParameter = Exercise("7.1", "FlatParameter")
FlatGradients = Exercise("7.2", "FlatGradients")
ShardedOptimizer = Exercise("7.3", "ShardedOptimizer")
ZeRO1 = Exercise("7.4", "ZeRO1", first="values")
clip_grad_norm_ = Exercise("7.5", "ZeRO1")
state_dict = Exercise("7.6", "ZeRO1")

AWKWARD = ("Tied", "Frozen", "Unused", "TwoBranches", "Scalar", "Mixed", "Crowd")

# -- 7.1 and 7.2

FlatParameter.table(
    ("layout", (1, 2, 3), flat_layout.parameters_lie_side_by_side),
    ("views", (1, 2), flat_layout.the_model_computes_with_them),
    ("all-gather", (1, 3, 4), flat_layout.every_shard_is_gathered),
    ("at once", (2, 3), flat_layout.the_launch_returns_at_once),
    ("memory", (4,), flat_layout.no_copy_stays),
)
for each in FlatParameter.checks:
    each.judge = flat_layout.hint_at_wait(each.judge)
give_hints({"is being modified": "Hint: should autograd record this copy?"}, FlatParameter)

FlatGradients.table(
    ("slices", (2,), flat_gradients.gradients_are_slices_of_zeros),
    ("plain", (2,), flat_gradients.a_plain_model_has_its_mean),
    ("values", WORLD_SIZES, flat_gradients.each_rank_gets_its_shard_of_the_mean),
    ("late gradients", (2,), flat_gradients.later_gradients_are_rejected),
    ("wire", (2, 3), flat_gradients.each_gradient_is_sent_once),
    ("memory", (4,), flat_gradients.gradients_are_held_once),
)

# -- 7.3 and 7.4, which train the same plans

PLAIN = [Plan("Plain", "SGD"), Plan("Plain", "AdamW")]
START = [Plan("Frozen", steps=0), Plan("Mixed", steps=0)]
BUILT = [Plan("Frozen", steps=0), Plan("Mixed", steps=0, split=True)]
SETTINGS = [
    Plan("Mixed", "Adam", split=True, scheduler="ExponentialLR"),
    *(Plan("Tied", optimizer, split=True, scheduler="OneCycleLR") for optimizer in ("AdamW", "SGD")),
]
LATE = [Plan("Frozen", split=split, late=True) for split in (False, True)]  # three elements: fewer than there are ranks
GROUP = [Plan("Tied", in_subgroup=True), Plan("Frozen", "SGD", in_subgroup=True, split=True)]
_HINT_ON_DEFAULTS = "Hint: which default settings does the inner optimizer have that the caller did not pass?"
of_settings = where_it_raises({"must support momentum": _HINT_ON_DEFAULTS})  # OneCycleLR's words if there are no betas
same_start = begin_at(trains_on_shards(START, starts_equal), "same start")
settings = of_settings(trains_on_shards(SETTINGS))

ShardedOptimizer.table(
    ("plain", (2,), trains_on_shards(PLAIN)),
    ("same start", (2, 3), trains_on_shards(START, starts_equal)),
    ("settings", (1, 3), settings),
    ("more parameters", (2, 4), same_start(begin_at(settings, "settings")(trains_on_shards(LATE)))),
    ("wire", (3,), trains_on_shards(BUILT, judge_building)),
    ("group", (3,), same_start(trains_on_shards(GROUP))),
)


def awkward_models(attempt: Attempt) -> list[Plan]:
    some = {1: 2, 2: len(AWKWARD), 3: 3, 4: 3}[attempt.world_size]
    optimizers = ("AdamW", "SGD", "UnknownOptimizer")
    return [Plan(model, optimizers[number % 3]) for number, model in enumerate(attempt.random.sample(AWKWARD, some))]


def loops(attempt: Attempt) -> list[Plan]:
    plans = [
        Plan("TwoBranches", "AdamW", zero_grad=("model", "optimizer", "keeping")),
        Plan("Mixed", "SGD", zero_grad=("model",)),
        Plan("Tied", "AdamW", micro_batches=3),
        Plan("Unused", "SGD", closure=True),
        Plan("Normed", "SGD", closure=True),
    ]
    if attempt.world_size > 1:
        idle = attempt.random.randrange(1, 5), attempt.random.randrange(attempt.world_size)
        plans.append(Plan("Plain", idle=idle, zero_grad=("model",)))
    return plans


ZeRO1.table(
    ("values", (2,), trains(PLAIN)),
    ("same start", (2, 3), trains(START, starts_equal)),
    ("awkward models", WORLD_SIZES, trains(awkward_models)),
    ("settings", (1, 3), of_settings(trains(SETTINGS))),
    ("more parameters", (2, 4), trains(LATE)),
    (
        "loops",
        (1, 3),
        where_it_raises({"step(closure)": "Hint: which line of step() runs first if there is a closure?"})(
            trains(loops)
        ),
    ),
    ("discarded mean", (1, 3), clip.means_may_be_thrown_away),
    ("hooks", (2,), unusual.hooks_run_once),
    ("stale gradients", (1, 2), unusual.used_up_gradients_are_rejected),
    (
        "wire",
        (3, 4),
        trains(
            [Plan("Frozen", steps=3), Plan("Mixed", steps=3, split=True), Plan("Crowd", "Adam", steps=3)],
            judge_building,
            sends({"zero_grad() and backward()": 0, "step()": 2}),
        ),
    ),
    ("memory", (2, 4), memory.the_state_is_sharded),
    ("masters", (2, 4), memory.master_weights_are_sharded),
    ("group", (3, 4), trains(GROUP)),
    ("bf16", (2, 4), unusual.bf16_stays_bf16),
)
give_hints(
    {
        "step() has already used these gradients": (
            "But zero_grad() was called after that step. Hint: which attribute has been True since then, and which "
            "method must change it?"
        )
    },
    ZeRO1,
)

# -- 7.5 and 7.6

clip_grad_norm_.table(
    ("clipping", WORLD_SIZES, clip.clipping_equals_one_process),
    ("below the bound", (1, 2), clip.small_gradients_stay),
    ("skipped step", (1, 3), clip.gradients_may_be_thrown_away),
    ("clipping wire", (2, 3), clip.of_a_sharded_optimizer),
    ("large gradients", (2,), clip.large_gradients_do_not_overflow),
    ("all frozen", (2,), clip.without_gradients_the_norm_is_zero),
    ("clipping group", (3, 4), clip.it_stays_inside_its_group),
)
state_dict.table(
    ("state", WORLD_SIZES, saved.it_is_a_plain_state),
    ("before the first step", (1, 3), saved.before_the_first_step),
    ("to one rank", (2, 3, 4), saved.one_rank_alone_may_have_it),
    ("other ranks' memory", (4,), saved.nobody_else_holds_it),
    ("another world size", (4,), saved.another_number_of_ranks_goes_on),
    ("plain state", (1, 2, 4), saved.a_plain_state_is_taken_over),
    ("foreign state", (1, 2), saved.foreign_states_are_rejected),
    ("shard only", (4,), memory.no_more_than_its_shard_is_held),
    ("loaded masters", (2, 4), memory.masters_come_back),
)
give_hints(
    {
        "'NoneType' object has no attribute": "Hint: which of the values may be None?",
        "grad_dtype": "Hint: which dtype does the flat tensor have, and which one does the entry have?",
    },
    state_dict,
)
