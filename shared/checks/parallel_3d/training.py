"""Check models on a mesh in training: their values, the bytes that they send per axis, their memory, and clipping."""

from dataclasses import replace

import torch

from shared import wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, error_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.models.small_gpts import TOKENS, SmallGPT
from shared.checks.parallel_3d.cases import AXES, Plan, drawn, layouts, mesh_of
from shared.checks.parallel_3d.judging import (
    Trained,
    build_on_mesh,
    judge_gradients,
    judge_layout,
    judge_losses,
    judge_norms,
    judge_precision,
    judge_training,
    train,
    train_alone,
)
from shared.wire.instrumentation import Call

_SLACK_BYTES = 256  # a few numbers per axis and step, such as losses and norms
_MOST_SLACK = 1.1  # a rank may keep a few small tensors besides its parameters
CLIPS, LEAVES = 0.05, 1000.0

# -- values


def judge_first_step(trained: Trained) -> None:
    """Judge what the exercise is about."""
    judge_layout(trained)
    judge_losses(trained)
    judge_gradients(trained)


def longer(attempt: Attempt, plan: Plan) -> Plan:
    """Return the plan with a number of steps that may be drawn."""
    return replace(plan, steps=attempt.sizes.steps(plan.steps), learning_rate_factor=attempt.sizes.learning_rate_factor)


def plain_splits(attempt: Attempt) -> None:
    for sizes in ({"tp": 2}, {"pp": 2}):
        judge_first_step(train_alone(attempt, Plan.sized(sizes, steps=1)))


def splits_combine(attempt: Attempt) -> None:
    """Train on every mesh. Replicas do not know of each other."""
    for sizes in layouts(attempt.world_size):
        if sizes["dp"] < attempt.world_size or attempt.world_size == 1:
            judge_training(train_alone(attempt, drawn(attempt, longer(attempt, Plan.sized(sizes)))))


def schedules_and_models(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        if sizes["dp"] == 1:
            schedule = attempt.random.choice(("gpipe", "zero_bubble"))
            model = attempt.random.choice((SmallGPT(tied=False, alike=True), SmallGPT(biases=True)))
            plan = longer(attempt, Plan.sized(sizes, schedule=schedule, model=model, steps=2))
            judge_training(train_alone(attempt, drawn(attempt, plan)))


def plain_replicas(attempt: Attempt) -> None:
    judge_first_step(train(attempt, Plan(dp=2, steps=1)))
    judge_first_step(train(attempt, Plan(pp=2, steps=1)))


def every_mesh_trains(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        judge_training(train(attempt, drawn(attempt, longer(attempt, Plan.sized(sizes, adam=True)))))


def zero_1_trains(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        if sizes["dp"] > 1 or attempt.world_size == 1:
            plan = longer(attempt, Plan.sized(sizes, adam=True, zero_stage=1))
            judge_training(train(attempt, drawn(attempt, plan)))


def awkward_models_train(attempt: Attempt) -> None:
    """Try models without a tie, with biases, and with frozen parameters, and gradients of two batches."""
    cases = (SmallGPT(tied=False, biases=True), ""), (SmallGPT(), "norm"), (SmallGPT(), "position")
    for index, (model, frozen) in enumerate(cases):
        sizes = attempt.random.choice([each for each in layouts(attempt.world_size) if each["dp"] < 4])
        plan = drawn(attempt, longer(attempt, Plan.sized(sizes, model=model, frozen=frozen, batches=2, steps=2)))
        judge_training(train(attempt, replace(plan, zero_stage=(index + attempt.world_size // 2) % 2)))
    if attempt.world_size == 4:  # the stages add up tied gradients after backward, so backward must not average them
        judge_training(train(attempt, Plan(dp=2, pp=2, micro_batches=1, steps=1)))


def replicas_stay_equal(attempt: Attempt) -> None:
    """Compare the bits of the replicas' parameters."""
    for zero_stage in (0, 1):
        trained = train(attempt, drawn(attempt, Plan(dp=2, tp=attempt.world_size // 2, zero_stage=zero_stage)))
        judge_training(trained)
        half = attempt.world_size // 2
        for rank in range(half):
            first, other = (trained.found[each].steps[-1].after for each in (rank, rank + half))
            different = [name for name in first if not torch.equal(first[name], other[name])]
            if different:
                message = f"{trained.plan}: {different[0]} differs in bits from that on rank {rank}"
                raise Wrong({rank + half: message}, "Hint: how does each replica get the sum of the gradients?")


def probe_rejection(parallel_cls, plan: Plan, samples: int) -> str:
    """Return the error that step() raises for a batch of this many samples, or ''."""
    trained = build_on_mesh(parallel_cls, plan.build_model(0).to(device_here()), plan)
    tokens = torch.zeros(samples, TOKENS, dtype=torch.long, device=device_here())
    return error_of(lambda: trained.step(tokens, tokens))


def uneven_batches_are_rejected(attempt: Attempt) -> None:
    dp, samples = attempt.world_size, 4 * attempt.world_size + attempt.random.randint(1, attempt.world_size - 1)
    context = f"a batch of {samples} samples on {dp} replicas"
    found = attempt.run(probe_rejection, Plan(dp=dp, micro_batches=1), samples, context=context)
    for rank, error in enumerate(found):
        numbers = [str(number) for number in (samples, dp)]
        if not error.startswith("ValueError") or any(number not in error for number in numbers):
            message = f"{context} raises {error or 'nothing'}; expected a ValueError that names {' and '.join(numbers)}"
            raise Wrong({rank: message}, "Hint: which two numbers must be divisible?")


# -- bytes by axis


def traffic_of(plan: Plan, rank: int) -> dict[str, float]:
    """Return the bytes that a rank has to send in one step along each axis, except for single numbers."""
    at, blocks = plan.on(rank), range(1, plan.model.layers + 1)
    own = plan.layers_of(at["pp"])
    is_first, is_last = at["pp"] == 0, at["pp"] == plan.pp - 1
    tokens = plan.samples * TOKENS
    activation_bytes = 8 * tokens * plan.model.width
    all_reduces = 4 * sum(index in blocks for index in own) + is_first + is_last
    tp_bytes = plan.micro_batches * (all_reduces * activation_bytes + is_last * 3 * 8 * tokens)
    sends = (not is_first) + (not is_last)
    is_tied = plan.model.tied and is_first != is_last
    tied_bytes = is_tied * 8 * -(-plan.model.vocabulary // plan.tp) * plan.model.width
    around = {axis: 2 * (plan.sizes[axis] - 1) / plan.sizes[axis] for axis in AXES}
    return {
        "dp": around["dp"] * plan.held_bytes(rank),
        "pp": plan.micro_batches * sends * activation_bytes + tied_bytes,
        "tp": around["tp"] * tp_bytes,
    }


def judge_traffic(trained: Trained) -> None:
    """Compare the bytes that each rank sends along each axis in the last step with what it has to send.

    Raises:
        Wrong: If a rank sends more along an axis, or all ranks together less, or if there is a barrier.
    """
    plan, sent = trained.plan, []
    for rank, found in enumerate(trained.found):
        calls = found.steps[-1].calls
        if any(call.op.endswith("barrier") for call in calls):
            message = f"{trained.at(plan.steps - 1)}: a barrier makes ranks wait for each other, and sends nothing"
            raise Wrong({rank: message}, "Hint: which result would be wrong without it?")
        sent.append(_sent_by_axis(plan, rank, calls))
        expected = traffic_of(plan, rank)
        for axis, nbytes in sent[rank].items():
            most = expected.get(axis, 0) * (1 + 1e-9) + _SLACK_BYTES
            if nbytes > most:
                where = f"along {axis}" if axis in AXES else f"among ranks {axis}"
                message = f"{trained.at(plan.steps - 1)}: {nbytes:,.0f} bytes are sent {where}"
                raise Wrong({rank: f"{message}, expected {expected.get(axis, 0):,.0f}"}, _hint_on_axis(axis))
    for axis in AXES:
        total = sum(each.get(axis, 0) for each in sent)
        least = sum(traffic_of(plan, rank)[axis] for rank in range(len(sent)))
        if total < least * (1 - 1e-9):
            message = f"{trained.at(plan.steps - 1)}: all ranks together send {total:,.0f} bytes along {axis}"
            raise Wrong(f"{message}, expected {least:,.0f}", "Hint: what must the ranks of this axis exchange?")


def _sent_by_axis(plan: Plan, rank: int, calls: list[Call]) -> dict[str, float]:
    axes = {ranks: axis for axis, ranks in plan.groups_of(rank).items()}
    found: dict[str, float] = {}
    for call in calls:
        if len(call.group_ranks) > 1 and call.op != "recv":
            axis = axes.get(tuple(sorted(call.group_ranks)), str(list(call.group_ranks)))
            found[axis] = found.get(axis, 0) + wire.sent_bytes_of(call, rank)
    return found


def _hint_on_axis(axis: str) -> str:
    return {
        "dp": "Hint: how often does a step average the gradients, and does each micro-batch send them?",
        "pp": "Hint: what has to go to the next stage, and what to the previous one?",
        "tp": "Hint: which collectives does a layer need, and how many micro-batches are there?",
    }.get(axis, "Hint: along which axis do these ranks have anything to exchange?")


def each_axis_sends_what_it_has_to(attempt: Attempt) -> None:
    """Count on every mesh of two ranks, and on those of four ranks that have two axes."""
    for sizes in layouts(attempt.world_size):
        if max(sizes.values()) > 2:
            continue
        plan = replace(drawn(attempt, Plan.sized(sizes, steps=1)), micro_batches=attempt.random.randint(2, 3))
        judge_traffic(train(attempt, plan))
        if sizes["dp"] > 1 and sizes["pp"] == 1:
            judge_traffic(train(attempt, replace(plan, zero_stage=1)))


def split_layers_send_what_they_have_to(attempt: Attempt) -> None:
    """Count without data parallelism, so that nothing else is sent."""
    for sizes in layouts(attempt.world_size):
        if sizes["dp"] == 1 and max(sizes.values()) <= 2:
            plan = replace(drawn(attempt, Plan.sized(sizes, steps=1)), micro_batches=attempt.random.randint(2, 3))
            judge_traffic(train_alone(attempt, plan))


# -- memory


def probe_split(split_model, plan: Plan, most_bytes: int, seed: int) -> int:
    """Split a model, and drop it. Returns the bytes that this rank then holds."""
    before_bytes = living_bytes()
    pipeline = _split_in_place(split_model, plan, seed)
    held_bytes = settled_bytes(most_bytes, before_bytes)
    del pipeline  # has been held until here
    return held_bytes


def _split_in_place(split_model, plan: Plan, seed: int):
    model = plan.build_model(seed).to(device_here())
    pipeline = split_model(model, mesh_of(plan), plan.schedule, plan.micro_batches)
    every = set(model.parameters())
    if copied := [name for name, each in pipeline.stage_parameters().items() if each not in every]:
        message = f"{copied[0]} of the pipeline is not a parameter of the model"
        raise AssertionError(f"{message}: expected split_model() to split the model in place, and not a copy of it")
    return pipeline


def each_stage_holds_its_layers(attempt: Attempt) -> None:
    """Measure what is left of the model when nothing but the pipeline refers to it."""
    model = SmallGPT(layers=2, head_width=6, vocabulary=12 * attempt.random.randint(15, 20))
    for sizes in ({"pp": 2, "tp": 2}, {"pp": 4}):
        plan, seed = Plan.sized(sizes, model=model), attempt.draw_seed()
        own = [plan.held_bytes(rank) for rank in range(attempt.world_size)]
        per_rank = [(int(_MOST_SLACK * nbytes), seed) for nbytes in own]
        for rank, held in enumerate(attempt.run(probe_split, plan, per_rank=per_rank, context=str(plan))):
            if held > per_rank[rank][0]:
                message = f"{plan}: this rank holds {held:,} bytes, expected {own[rank]:,} for its own layers"
                raise Wrong({rank: message}, "Hint: does loss_fn, or anything else, still refer to the whole model?")


def probe_memory(parallel_cls, plan: Plan, most_bytes: int, seed: int, batches: list) -> int:
    """Train two steps, without recording anything. Returns the bytes that this rank then holds."""
    before_bytes = living_bytes()
    trained = build_on_mesh(parallel_cls, plan.build_model(seed).to(device_here()), plan)
    for x, y in batches:
        trained.optimizer.zero_grad()
        trained.step(x.to(device_here()), y.to(device_here()))
        trained.optimizer.step()
    return settled_bytes(most_bytes, before_bytes)


def each_rank_holds_its_part(attempt: Attempt) -> None:
    """Measure parameters, gradients and optimizer state: 4 numbers per own parameter, or 2 + 2/dp with ZeRO-1."""
    model = SmallGPT(layers=2, head_width=6, vocabulary=12 * attempt.random.randint(15, 20))
    for sizes, zero_stage in (
        ({"dp": 2, "tp": 2}, 0),
        ({"dp": 2, "tp": 2}, 1),
        ({"pp": 2, "tp": 2}, 0),
        ({"dp": 4}, 1),
    ):
        plan = Plan.sized(sizes, zero_stage=zero_stage, model=model, adam=True, steps=2)
        numbers = 4 if zero_stage == 0 else 2 + 2 / plan.dp
        most = [int(_MOST_SLACK * numbers * plan.held_bytes(rank)) for rank in range(attempt.world_size)]
        seed, batches = attempt.draw_seed(), plan.draw_batches(attempt)
        per_rank = [(nbytes, seed, batches) for nbytes in most]
        for rank, held in enumerate(attempt.run(probe_memory, plan, per_rank=per_rank, context=str(plan))):
            if held > most[rank]:
                own = plan.held_bytes(rank)
                message = (
                    f"{plan}: after two steps, this rank holds {held:,} bytes, {held / own:.1f} times its parameters"
                )
                hint = "Hint: does anything still refer to the whole model, or is the optimizer's state not sharded?"
                if zero_stage == 0:
                    hint = (
                        "Hint: does anything still refer to the whole model? And does finish_gradient_sync() run even "
                        "with one replica, so that the gradients lie in its buckets?"
                    )
                raise Wrong({rank: f"{message}; expected {numbers:g} times"}, hint)


# -- clipping


def plain_norms(attempt: Attempt) -> None:
    for sizes in ({"tp": 2}, {"dp": 2}, {"pp": 2}):
        trained = train(attempt, Plan.sized(sizes, max_norm=CLIPS, steps=1))
        judge_norms(trained)
        judge_training(trained)


def norms_on_every_mesh(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        judge_training(train(attempt, drawn(attempt, Plan.sized(sizes, max_norm=CLIPS))))


def norms_with_zero_1(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        if sizes["dp"] > 1 or attempt.world_size == 1:
            judge_training(train(attempt, drawn(attempt, Plan.sized(sizes, max_norm=CLIPS, zero_stage=1))))


def awkward_norms(attempt: Attempt) -> None:
    """Try biases that tp ranks share, frozen parameters, gradients that need no clipping, no tie, and float32."""
    cases = (
        (SmallGPT(biases=True, tied=False), "", CLIPS),
        (SmallGPT(tied=False, alike=True), "norm", CLIPS),
        (SmallGPT(), "position", CLIPS),
        (SmallGPT(), "", LEAVES),
    )
    for index, (model, frozen, max_norm) in enumerate(cases):
        axis = "pp" if model.alike else "tp"  # the ends of the pipeline may be alike without being tied
        sizes = attempt.random.choice([each for each in layouts(attempt.world_size) if each[axis] > 1])
        plan = drawn(attempt, Plan.sized(sizes, model=model, frozen=frozen, max_norm=max_norm, steps=2))
        judge_training(train(attempt, replace(plan, zero_stage=(index + attempt.world_size // 2) % 2)))
    if attempt.world_size == 4:  # two stages have no gradients
        judge_training(train(attempt, Plan(pp=4, frozen="blocks", max_norm=CLIPS, steps=1)))
    in_float32 = Plan(tp=attempt.world_size, max_norm=CLIPS, steps=1, dtype=torch.float32)
    judge_precision(train(attempt, drawn(attempt, in_float32)))


def clipping_sends_one_element(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        trained = train(attempt, drawn(attempt, Plan.sized(sizes, max_norm=CLIPS, steps=1)))
        for rank, found in enumerate(trained.found):
            sent = sum(call.payload_bytes for call in found.steps[0].clipping_calls if len(call.group_ranks) > 1)
            if sent > 3 * 8:
                message = f"{trained.plan}: clip_grad_norm_() sends {sent:,} bytes, expected one element"
                raise Wrong({rank: message}, "Hint: what can a rank add up before it sends?")
    zero_1 = Plan(dp=2, tp=attempt.world_size // 2, zero_stage=1, max_norm=CLIPS, steps=1)
    judge_traffic(train(attempt, drawn(attempt, zero_1)))  # the gradients are averaged in clipping, and only there
