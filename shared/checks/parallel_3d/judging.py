"""Train models on a mesh, and judge their losses, gradients, norms and parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.parallel_3d.cases import Plan, Step, mesh_of, one_process
from shared.models import gpt_layers
from shared.wire import instrumentation
from shared.wire.instrumentation import Call

_FLOAT64_TOLERANCE = 1e-11  # for what is added up in float64, and not in float32
_ADAM_TOLERANCE = 1e-9
_CLIP_TOLERANCE = 1e-6  # torch adds 1e-6 to a norm before it divides by it, which need not be imitated
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


@dataclass
class Stepped:
    """What a rank computed in one step."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]  # before clipping; none with ZeRO-1
    own_gradients: dict[str, torch.Tensor | None]  # with ZeRO-1, before it averages them
    norm: torch.Tensor | None
    clipped: dict[str, torch.Tensor | None]  # the gradients after clipping; none with ZeRO-1
    after: dict[str, torch.Tensor]  # the parameters after the step
    calls: list[Call]
    clipping_calls: list[Call]  # those of clip_grad_norm_()


@dataclass
class OnRank:
    """What one rank computed."""

    start: dict[str, torch.Tensor]  # the rank's parameters before the first step
    steps: list[Stepped]


def probe_training(piece, build: Callable, plan: Plan, seed: int, batches: list) -> OnRank:
    """Train on this rank."""
    trained = build(piece, plan.build_model(seed).to(device_here()), plan)
    found = OnRank(_copied(trained.stage_parameters()), [])
    for number in range(plan.steps):
        of_step = batches[number * plan.batches : (number + 1) * plan.batches]
        found.steps.append(_step(trained, plan, of_step))
    return found


def _step(trained, plan: Plan, batches: list) -> Stepped:
    losses, norm = [], None
    trained.optimizer.zero_grad()
    with instrumentation.listening() as step_calls:
        for x, y in batches:
            loss = torch.as_tensor(trained.step(x.to(device_here()), y.to(device_here())))
            losses.append(loss.detach().cpu().clone())
    gradients = _copied({name: p.grad for name, p in trained.stage_parameters().items()})
    with instrumentation.listening() as clipping_calls:
        if plan.max_norm is not None:
            norm = torch.as_tensor(trained.clip_grad_norm_(plan.max_norm)).detach().cpu().clone()
    clipped = {name: p.grad for name, p in trained.stage_parameters().items()}
    clipped = _copied(clipped) if plan.zero_stage == 0 and plan.max_norm is not None else {}
    with instrumentation.listening() as update_calls:
        trained.optimizer.step()
    after, calls = _copied(trained.stage_parameters()), [*step_calls, *clipping_calls, *update_calls]
    whole, own = (gradients, {}) if plan.zero_stage == 0 else ({}, gradients)
    return Stepped(losses, whole, own, norm, clipped, after, calls, clipping_calls)


def _copied(tensors: dict) -> dict:
    return {name: None if each is None else each.detach().cpu().clone() for name, each in tensors.items()}


@dataclass(frozen=True)
class Trained:
    """What the ranks computed together, and what one process computes."""

    plan: Plan
    found: list[OnRank]
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
        if stray := sorted(found.start.keys() ^ names.keys()):
            has = "holds" if stray[0] in found.start else "does not hold"
            message = f"{plan}: this rank is on stage {plan.on(rank)['pp']}, and {has} {stray[0]}"
            hint = "Hint: which group does the pipeline get, and which layers?"
            if stray[0].endswith("output.weight"):
                hint = "Hint: is the output layer's weight still the embedding's?"
            raise Wrong({rank: message}, hint)
        for name in names:
            shape, whole = list(found.start[name].shape), trained.start[name]
            if shape != plan.shape_of(name, whole, rank):
                message = f"{plan}: {name} has the shape {shape}, expected {plan.shape_of(name, whole, rank)}"
                raise Wrong({rank: message}, "Hint: over which group is each layer split, and before which call?")
            expected, rows = plan.shard_of(name, whole, rank), found.start[name]
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
        for loss, expected in zip(found.steps[step].losses, losses, strict=True):
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
    every = [found.steps[step].losses[0] for found in trained.found]
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
        for name, gradient in reversed(found.steps[step].gradients.items()):
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
        for name, gradient in reversed(found.steps[step].own_gradients.items()):
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
            for name, parameter in found.steps[step].after.items():
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
    norms = []
    for rank, found in enumerate(trained.found):
        norm = found.steps[step].norm
        assert norm is not None  # The plan clips.
        if norm.shape != () or norm.dtype != torch.float64:
            kind = f"a tensor of shape {list(norm.shape)} and dtype {norm.dtype}"
            message = f"{trained.plan}: the norm is {kind}, expected no dimensions, and float64"
            raise Wrong({rank: message}, "Hint: which shape and dtype does your sum of squares have?")
        norms.append(norm)
    return norms


def judge_clipped(trained: Trained, step: int) -> None:
    """Compare the gradients after clipping, on every rank, if they are not sharded.

    Raises:
        Wrong: If they differ from those of one process.
    """
    for rank, found in enumerate(trained.found):
        expected = trained.expected_on(rank, step)
        for name, gradient in found.steps[step].clipped.items():
            whole, before = expected.clipped[name], found.steps[step].gradients[name]
            if whole is None or gradient is None or before is None:
                continue
            own = trained.plan.shard_of(name, whole, rank)
            rows = gradient[: len(own)]
            if not nearly_equal(rows, own, _CLIP_TOLERANCE):
                difference = first_difference(rows, own, _CLIP_TOLERANCE)
                message = f"{trained.at(step)}: after clipping, the gradient of {name}: {difference}"
                hint = "Hint: by which factor is each gradient scaled, and how often?"
                max_norm = trained.plan.max_norm
                if expected.norm is not None and max_norm is not None and expected.norm <= max_norm:
                    hint = _HINT_ON_ROOM
                elif nearly_equal(rows, before[: len(own)], _CLIP_TOLERANCE):
                    hint = "It is the same as before. Hint: are the gradients scaled in place?"
                raise Wrong({rank: message}, hint)


def judge_precision(trained: Trained) -> None:
    """Compare the first norm with the squares of the ranks' own gradients. Each parameter is on one stage.

    Raises:
        Wrong: If they were not added up in float64.
    """
    own, copies = 0.0, {}
    for found in trained.found:
        for name, gradient in found.steps[0].gradients.items():
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
    norms = [each.item() for each in _norms_of(trained, step)]
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
