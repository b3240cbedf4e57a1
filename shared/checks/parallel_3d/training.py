"""Judge models on a mesh in training: losses, gradients, norms, parameters, bytes per axis, and memory."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shared import wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.models.small_gpts import TOKENS, SmallGPT
from shared.checks.parallel_3d.cases import AXES, Plan, Step, drawn, layouts, mesh_of, one_process
from shared.models import gpt_layers
from shared.wire import instrumentation
from shared.wire.instrumentation import Call

_FLOAT64_TOLERANCE = 1e-11  # for what is added up in float64, and not in float32
_ADAM_TOLERANCE = 1e-9
_CLIP_TOLERANCE = 1e-6  # torch adds 1e-6 to a norm before it divides by it, which need not be imitated
_SLACK_BYTES = 256  # a few numbers per axis and step, such as losses and norms
_MOST_SLACK = 1.1  # a rank may keep a few small tensors besides its parameters
CLIPS, LEAVES = 0.05, 1000.0
_HINT_ON_PARTS = "Hint: is each part contiguous, does replica 0 get the first one, and is the average left to ZeRO1?"
_HINT_ON_SAMPLES = "Hint: which ranks need the same samples, and by which number do you choose them?"
_HINT_ON_AVERAGE = "Hint: which line averages gradients over dp, and how often does it run in a step?"
_HINT_ON_NO_SYNC = "Hint: which line averages gradients over dp, and is no_sync() still active there?"
_HINT_ON_ROOM = "The norm is less than max_norm. Hint: should anything be scaled?"


class Alone(nn.Module):
    """A pipeline of split layers, without data parallelism, with the interface of Parallel3D."""

    def __init__(self, pipeline, plan: Plan):
        super().__init__()
        self.step, self.stage_parameters = pipeline.step, pipeline.stage_parameters
        trained = [p for p in pipeline.stage_parameters().values() if p.requires_grad]
        self.optimizer = plan.optimizer_cls(trained, **plan.defaults)


def build_alone(split_model: Callable, model, plan: Plan) -> Alone:
    """Build a student's pipeline on the mesh."""
    return Alone(split_model(model, mesh_of(plan), plan.schedule, plan.micro_batches), plan)


def build_on_mesh(parallel_cls: Callable, model, plan: Plan):
    """Build a student's Parallel3D."""
    options = {"schedule": plan.schedule, "micro_batches": plan.micro_batches, "zero_stage": plan.zero_stage}
    return parallel_cls(model, mesh_of(plan), plan.optimizer_cls, **options, **plan.defaults)


def probe_training(piece, build: Callable, plan: Plan, seed: int, batches: list) -> dict:
    """Train on this rank.

    Returns:
        The parameters at the start, and for each step the losses, the gradients before and after clipping, the norm,
        the parameters after it, and the calls of each phase.
    """
    trained = build(piece, plan.build_model(seed).to(device_here()), plan)
    found = {"start": _copied(trained.stage_parameters()), "steps": []}
    for number in range(plan.steps):
        of_step = batches[number * plan.batches : (number + 1) * plan.batches]
        found["steps"].append(_step(trained, plan, of_step))
    return found


def _step(trained, plan: Plan, batches: list) -> dict:
    calls, done = {}, {"losses": [], "norm": None, "gradients": {}, "own gradients": {}}
    trained.optimizer.zero_grad()
    with instrumentation.listening() as calls["step"]:
        for x, y in batches:
            loss = torch.as_tensor(trained.step(x.to(device_here()), y.to(device_here())))
            done["losses"].append(loss.detach().cpu().clone())
    gradients = {name: p.grad for name, p in trained.stage_parameters().items()}
    done["gradients" if plan.zero_stage == 0 else "own gradients"] = _copied(gradients)
    with instrumentation.listening() as calls["clip_grad_norm_"]:
        if plan.max_norm is not None:
            done["norm"] = torch.as_tensor(trained.clip_grad_norm_(plan.max_norm)).detach().cpu().clone()
    clipped = {name: p.grad for name, p in trained.stage_parameters().items()}
    done["clipped"] = _copied(clipped) if plan.zero_stage == 0 and plan.max_norm is not None else {}
    with instrumentation.listening() as calls["the optimizer's step"]:
        trained.optimizer.step()
    return done | {"after": _copied(trained.stage_parameters()), "calls": calls}


def _copied(tensors: dict) -> dict:
    return {name: None if each is None else each.detach().cpu().clone() for name, each in tensors.items()}


@dataclass(frozen=True)
class Trained:
    """What the ranks computed together, and what one process computes."""

    plan: Plan
    found: list[dict]  # the results of probe_training, by rank
    expected: list[Step]
    start: dict[str, torch.Tensor]  # the whole model's parameters before the first step
    per_replica: list[list[Step]] | None = None  # by replica, if nothing is averaged over them

    def at(self, step: int) -> str:
        return f"{self.plan}, step {step + 1}"

    def expected_on(self, rank: int, step: int) -> Step:
        if self.per_replica is not None:
            return self.per_replica[self.plan.on(rank)["dp"]][step]
        return self.expected[step]


def train(attempt: Attempt, plan: Plan) -> Trained:
    """Train the student's Parallel3D on fresh data."""
    seed, batches = attempt.draw_seed(), plan.draw_batches(attempt)
    found = attempt.run(probe_training, build_on_mesh, plan, seed, batches, context=str(plan))
    return Trained(plan, found, one_process(plan, seed, batches), _start(plan, seed))


def train_alone(attempt: Attempt, plan: Plan) -> Trained:
    """Train the student's pipelines, one for each replica, with a batch of its own."""
    seed, alone = attempt.draw_seed(), replace(plan, dp=1)
    drawn_batches = [alone.draw_batches(attempt) for _ in range(plan.dp)]
    per_rank = [(drawn_batches[plan.on(rank)["dp"]],) for rank in range(attempt.world_size)]
    try:
        found = attempt.run(probe_training, build_alone, plan, seed, per_rank=per_rank, context=str(plan))
    except Wrong as wrong:
        if wrong.hangs:
            wrong.hint = _hint_on_wait(plan, wrong.evidence) or wrong.hint
        raise
    per_replica = [one_process(alone, seed, batches) for batches in drawn_batches]
    return Trained(plan, found, per_replica[0], _start(plan, seed), per_replica)


def _hint_on_wait(plan: Plan, evidence: str) -> str:
    """Recognize a call along an axis on which no rank has another one to wait for."""
    if plan.pp == 1 and re.search(r"waits? in recv", evidence):
        return "With pp = 1, no rank has to receive anything. Hint: which group does the pipeline get?"
    if plan.tp == 1 and re.search(r"waits? in all_reduce", evidence):
        return "With tp = 1, no rank has to wait in an all-reduce. Hint: which groups do the layers and the loss get?"
    return ""


def _start(plan: Plan, seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in gpt_layers(plan.build_model(seed)).named_parameters()}


# -- values


def judge_layout(trained: Trained) -> None:
    """Check that each rank holds its shards of its stage's parameters, and no others.

    Raises:
        Wrong: If not.
    """
    plan, chain = trained.plan, gpt_layers(trained.plan.build_model(0))
    for rank, found in enumerate(trained.found):
        names = plan.names_on(rank, chain)
        if stray := sorted(found["start"].keys() ^ names.keys()):
            has = "holds" if stray[0] in found["start"] else "does not hold"
            message = f"{plan}: this rank is on stage {plan.on(rank)['pp']}, and {has} {stray[0]}"
            hint = "Hint: which group does the pipeline get, and which layers?"
            if stray[0].endswith("output.weight"):
                hint = "Hint: is the output layer's weight still the embedding's?"
            raise Wrong({rank: message}, hint)
        for name in names:
            shape, whole = list(found["start"][name].shape), trained.start[name]
            if shape != plan.shape_of(name, whole, rank):
                message = f"{plan}: {name} has the shape {shape}, expected {plan.shape_of(name, whole, rank)}"
                raise Wrong({rank: message}, "Hint: over which group is each layer split, and before which call?")
            expected, rows = plan.shard_of(name, whole, rank), found["start"][name]
            if not nearly_equal(rows[: len(expected)], expected):
                message = f"{plan}: before the first step, {name}: {first_difference(rows[: len(expected)], expected)}"
                raise Wrong({rank: message}, "Hint: which ranks have the same shard, and which calls send parameters?")


def judge_losses(trained: Trained, step: int = 0) -> None:
    """Compare the losses of one step, on every rank.

    Raises:
        Wrong: If they differ from those of one process.
    """
    plan = trained.plan
    for rank, found in enumerate(trained.found):
        losses = trained.expected_on(rank, step).losses
        for loss, expected in zip(found["steps"][step]["losses"], losses, strict=True):
            if loss.shape != () or loss.dtype != torch.float64:
                kind = f"a tensor of shape {list(loss.shape)} and dtype {loss.dtype}"
                message = f"{trained.at(step)}: the loss is {kind}, expected no dimensions, and float64"
                raise Wrong({rank: message}, "Hint: what does the pipeline's step return?")
            if not nearly_equal(loss, expected, _tolerance(plan)):
                message = f"{trained.at(step)}: the loss is {loss.item():.8g}, expected {expected.item():.8g}"
                raise Wrong({rank: message}, _hint_on_loss(trained, step, loss, expected))


def _tolerance(plan: Plan) -> float:
    return _ADAM_TOLERANCE if plan.max_norm is None else _CLIP_TOLERANCE


def _hint_on_loss(trained: Trained, step: int, loss: torch.Tensor, expected: torch.Tensor) -> str:
    plan = trained.plan
    every = [found["steps"][step]["losses"][0] for found in trained.found]
    same = plan.pp * plan.tp if trained.per_replica is None else 1  # ranks that have the loss of the same replica
    for times in (same, plan.dp * same):
        if same > 1 and nearly_equal(loss, times * expected, 1e-6):
            return f"It is exactly {times} times too large. Hint: over which group is it summed?"
    for times, why in _factors(plan):
        if nearly_equal(loss, times * expected, 1e-6):
            return f"It is exactly {times} times too large, and there are {times} {why}. Hint: is it a sum or a mean?"
        if nearly_equal(loss * times, expected, 1e-6):
            return f"It is exactly {times} times too small, and there are {times} {why}. Hint: what is divided twice?"
    if step:
        return "The earlier losses were right. Hint: which parameters were updated with a wrong gradient?"
    if plan.dp > 1 and nearly_equal(torch.stack([every[0], every[-1]]).mean(), expected, 1e-6):
        return "The mean of the replicas' losses would be right. Hint: do all ranks return the same loss?"
    if plan.dp > 1:
        return _HINT_ON_SAMPLES
    padding = ", and what happens to the logits of padding" if plan.model.vocabulary % plan.tp else ""
    return f"Hint: which group does each part need{padding}?"


def _factors(plan: Plan) -> list[tuple[int, str]]:
    """Return the numbers by which something may be too large or too small, and what there are so many of."""
    counts = {"replicas": plan.dp, "micro-batches": plan.micro_batches, "tp ranks": plan.tp, "stages": plan.pp}
    return [(count, what) for what, count in counts.items() if count > 1]


def judge_gradients(trained: Trained, step: int = 0) -> None:
    """Compare the gradients before clipping, on every rank, if they are not sharded.

    Raises:
        Wrong: If they differ from those of one process.
    """
    for rank, found in enumerate(trained.found):
        expected = trained.expected_on(rank, step)
        # In the order of backward, because the first wrong gradient explains the ones after it.
        for name, gradient in reversed(found["steps"][step]["gradients"].items()):
            whole = expected.gradients[name]
            what = f"{trained.at(step)}: the gradient of {name}"
            if whole is None:
                if gradient is not None:
                    message = f"{what} is a tensor, expected None, because the parameter is frozen"
                    raise Wrong({rank: message}, "Hint: which parameters have a gradient to average?")
                continue
            if gradient is None:
                raise Wrong({rank: f"{what} is None"}, "Hint: does backward run on every stage?")
            own = trained.plan.shard_of(name, whole, rank)
            rows = gradient[: len(own)]
            if not nearly_equal(rows, own, _tolerance(trained.plan)):
                message = f"{what}: {first_difference(rows, own, _tolerance(trained.plan))}"
                raise Wrong({rank: message}, _hint_on_gradient(trained, rank, step, name, rows, own))


def judge_own_gradients(trained: Trained, step: int = 0) -> None:
    """With ZeRO-1, compare each replica's gradients, before ZeRO1 averages them, with those of its samples.

    Raises:
        Wrong: If they are those of other samples.
    """
    plan = trained.plan
    for rank, found in enumerate(trained.found):
        replica = plan.on(rank)["dp"]
        expected = trained.expected_on(rank, step).of_replicas[replica]
        for name, gradient in reversed(found["steps"][step]["own gradients"].items()):
            own = plan.shard_of(name, expected[name], rank) if name in expected else None
            if own is None or gradient is None or nearly_equal(gradient[: len(own)], own, _tolerance(plan)):
                continue
            message = f"{trained.at(step)}: after step(), the gradient of {name} is not that of part {replica + 1}"
            message += f" of the {plan.dp} parts of the global batch"
            raise Wrong({rank: message}, _HINT_ON_PARTS)


def _hint_on_gradient(trained: Trained, rank: int, step: int, name: str, found, expected) -> str:
    plan = trained.plan
    if found.shape != expected.shape:
        return "Hint: over which group is each layer split?"
    if plan.dp > 1 and trained.per_replica is None:
        own = trained.expected[step].of_replicas[plan.on(rank)["dp"]][name]
        if nearly_equal(found, plan.shard_of(name, own, rank), 1e-8):
            hint = _HINT_ON_AVERAGE if plan.zero_stage else _HINT_ON_NO_SYNC
            return f"It is the gradient of this replica's own samples. {hint}"
    for times, why in _factors(plan):
        if nearly_equal(found, times * expected, 1e-8):
            return f"It is exactly {times} times too large, and there are {times} {why}. {_HINT_ON_AVERAGE}"
        if nearly_equal(found * times, expected, 1e-8):
            return f"It is exactly {times} times too small, and there are {times} {why}. {_HINT_ON_AVERAGE}"
    if nearly_equal(found, 2 * expected, 1e-8):
        return "It is exactly 2 times too large. Hint: is a gradient added to itself, where a group has a single rank?"
    if plan.dp > 1 and plan.pp > 1 and plan.model.tied and "token_embedding" in name:
        return "Two stages have this gradient. Hint: is it averaged over dp after they have added up their parts?"
    return "Hint: between which ranks must this gradient be averaged, and do they have the same shard?"


def judge_training(trained: Trained) -> None:
    """Compare all steps: losses, gradients, norms, and parameters.

    Raises:
        Wrong: If they differ from those of one process.
    """
    plan = trained.plan
    judge_layout(trained)
    for step in range(plan.steps):
        judge_losses(trained, step)
        judge_gradients(trained, step)
        if plan.zero_stage:
            judge_own_gradients(trained, step)
        if plan.max_norm is not None:
            judge_norms(trained, step)
            judge_clipped(trained, step)
        for rank, found in enumerate(trained.found):
            after = trained.expected_on(rank, step).after
            for name, parameter in found["steps"][step]["after"].items():
                expected = plan.shard_of(name, after[name], rank)
                rows, tolerance = parameter[: len(expected)], _tolerance(plan)
                if not nearly_equal(rows, expected, tolerance):
                    difference = first_difference(rows, expected, tolerance)
                    evidence = f"{trained.at(step)}, {name} after it: {difference}"
                    raise Wrong({rank: evidence}, _hint_on_update(trained, step))


def _hint_on_update(trained: Trained, step: int) -> str:
    plan = trained.plan
    if plan.zero_stage and plan.max_norm is not None:
        norm = trained.expected[step].norm
        if norm is not None and norm <= plan.max_norm:
            return _HINT_ON_ROOM
        return "Hint: which gradients does ZeRO1 use for its update, and are these scaled in place?"
    if plan.zero_stage and plan.dp > 1:
        return "Hint: over which group does ZeRO1 average the gradients and shard the optimizer state?"
    return "Hint: which code updates this parameter, and how often does it run in a step?"


def judge_norms(trained: Trained, step: int = 0) -> None:
    """Compare the norm before clipping, on every rank.

    Raises:
        Wrong: If it differs from that of one process.
    """
    expected = trained.expected[step].norm
    assert expected is not None  # The plan clips.
    tolerance = _CLIP_TOLERANCE if step else _ADAM_TOLERANCE  # nothing has been scaled before the first norm
    for rank, norm in enumerate(_norms_of(trained, step)):
        if not nearly_equal(norm, expected.double(), tolerance):
            message = f"{trained.at(step)}: the norm is {norm.item():.8g}, expected {expected.item():.8g}"
            raise Wrong({rank: message}, _hint_on_norm(trained, step, norm.item()))


def _norms_of(trained: Trained, step: int) -> list[torch.Tensor]:
    """Return the norm of each rank.

    Raises:
        Wrong: If one has dimensions, or another dtype than float64.
    """
    norms = [found["steps"][step]["norm"] for found in trained.found]
    for rank, norm in enumerate(norms):
        if norm.shape != () or norm.dtype != torch.float64:
            kind = f"a tensor of shape {list(norm.shape)} and dtype {norm.dtype}"
            message = f"{trained.plan}: the norm is {kind}, expected no dimensions, and float64"
            raise Wrong({rank: message}, "Hint: which shape and dtype does your sum of squares have?")
    return norms


def judge_clipped(trained: Trained, step: int) -> None:
    """Compare the gradients after clipping, on every rank, if they are not sharded.

    Raises:
        Wrong: If they differ from those of one process.
    """
    for rank, found in enumerate(trained.found):
        expected = trained.expected_on(rank, step)
        for name, gradient in found["steps"][step]["clipped"].items():
            whole = expected.clipped[name]
            if whole is None or gradient is None:
                continue
            own = trained.plan.shard_of(name, whole, rank)
            rows, before = gradient[: len(own)], found["steps"][step]["gradients"][name][: len(own)]
            if not nearly_equal(rows, own, _CLIP_TOLERANCE):
                difference = first_difference(rows, own, _CLIP_TOLERANCE)
                message = f"{trained.at(step)}: after clipping, the gradient of {name}: {difference}"
                hint = "Hint: by which factor is each gradient scaled, and how often?"
                max_norm = trained.plan.max_norm
                if expected.norm is not None and max_norm is not None and expected.norm <= max_norm:
                    hint = _HINT_ON_ROOM
                elif nearly_equal(rows, before, _CLIP_TOLERANCE):
                    hint = "It is the same as before. Hint: are the gradients scaled in place?"
                raise Wrong({rank: message}, hint)


def judge_precision(trained: Trained) -> None:
    """Compare the first norm with the squares of the ranks' own gradients. Each parameter is on one stage.

    Raises:
        Wrong: If they were not added up in float64.
    """
    own, copies = 0.0, {}
    for found in trained.found:
        for name, gradient in found["steps"][0]["gradients"].items():
            squares = 0.0 if gradient is None else gradient.double().square().sum().item()
            if _is_replicated(trained.plan, name, trained.start[name]):
                copies.setdefault(name, []).append(squares)
            else:
                own += squares
    # In float32, a parameter's copies may differ between ranks, and any of them may be counted.
    low, high = ((own + sum(map(choose, copies.values()))) ** 0.5 for choose in (min, max))
    slack = _FLOAT64_TOLERANCE * high
    for rank, norm in enumerate(_norms_of(trained, 0)):
        if not low - slack <= norm.item() <= high + slack:  # This finds nan, too.
            message = f"{trained.plan}, a model in float32: the norm is {norm.item():.13g}, expected {high:.13g}"
            raise Wrong({rank: message}, "Hint: in which dtype are the squares computed and added up?")


def _hint_on_norm(trained: Trained, step: int, norm: float) -> str:
    """Recognize what has been counted too often."""
    plan, gradients = trained.plan, trained.expected[step].gradients
    norms = [found["steps"][step]["norm"].flatten()[0].item() for found in trained.found]
    known = {name: each for name, each in gradients.items() if each is not None}
    squares = {name: each.square().sum().item() for name, each in known.items()}
    total, chain = sum(squares.values()), gpt_layers(plan.build_model(0))
    ends = plan.names_on(0, chain).keys() & plan.names_on(len(trained.found) - 1, chain).keys()
    tied = sum(squares[name] for name in squares if plan.pp > 1 and name in ends)
    replicated = sum(squares[name] for name in squares if _is_replicated(plan, name, known[name]))

    def is_norm_of(square: float) -> bool:
        return abs(norm - square**0.5) <= 1e-6 * norm

    if plan.max_norm is not None and abs(norm - plan.max_norm) <= 1e-4 * norm:
        return "It is max_norm. Hint: do you return the norm from before or from after scaling?"
    if max(norms) - min(norms) > 1e-9 * max(norms):
        return "The ranks have different norms. Hint: over which ranks is the sum of the squares added up?"
    if plan.tp > 1 and is_norm_of(total + (plan.tp - 1) * replicated):
        return f"It counts replicated parameters {plan.tp} times. Hint: how many tp ranks have the same gradient?"
    if tied and is_norm_of(total + tied):
        return "It counts the tied embedding twice. Hint: how many stages have the same gradient?"
    for times in sorted({plan.dp, plan.tp, plan.pp, len(trained.found)} - {1}):
        if is_norm_of(total * times):
            return f"Its square is {times} times too large. Hint: which ranks have equal gradients after step()?"
        if is_norm_of(total / times):
            return f"Its square is {times} times too small. Hint: which ranks have parts that no other rank has?"
    return "Hint: which gradients does the sum contain, and how many ranks have each of them?"


def _is_replicated(plan: Plan, name: str, whole: torch.Tensor) -> bool:
    return plan.shard_of(name, whole, 0).shape == whole.shape and plan.tp > 1


# -- checks of split_model and Parallel3D


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
            first, other = (trained.found[each]["steps"][-1]["after"] for each in (rank, rank + half))
            different = [name for name in first if not torch.equal(first[name], other[name])]
            if different:
                message = f"{trained.plan}: {different[0]} differs in bits from that on rank {rank}"
                raise Wrong({rank + half: message}, "Hint: how does each replica get the sum of the gradients?")


def probe_rejection(parallel_cls, plan: Plan, samples: int) -> str:
    """Return the error that step() raises for a batch of this many samples, or ''."""
    trained = build_on_mesh(parallel_cls, plan.build_model(0).to(device_here()), plan)
    tokens = torch.zeros(samples, TOKENS, dtype=torch.long, device=device_here())
    try:
        trained.step(tokens, tokens)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
        calls = [call for of_phase in found["steps"][-1]["calls"].values() for call in of_phase]
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
            calls = found["steps"][0]["calls"]["clip_grad_norm_"]
            sent = sum(call.payload_bytes for call in calls if len(call.group_ranks) > 1)
            if sent > 3 * 8:
                message = f"{trained.plan}: clip_grad_norm_() sends {sent:,} bytes, expected one element"
                raise Wrong({rank: message}, "Hint: what can a rank add up before it sends?")
    zero_1 = Plan(dp=2, tp=attempt.world_size // 2, zero_stage=1, max_norm=CLIPS, steps=1)
    judge_traffic(train(attempt, drawn(attempt, zero_1)))  # the gradients are averaged in clipping, and only there
