"""Judge Pipeline in training: all schedules, tied weights, AdamW, clipping, bf16, and stages that must not wait."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.model_parallel.judges import Trained, judge_layout, judge_traffic, judge_training, train
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of, staying_inside
from shared.checks.pipeline.cases import WEIGHTS_LAST, Stack, Text
from shared.wire import instrumentation
from shared.wire.instrumentation import Call

STEPS = 5
CLIPS = 0.05
# With a larger eps, a gradient near 0 does not become a step of size lr.
_ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
_ADAM_TOLERANCE = 1e-9
_SGD_LR = 0.1  # with 1.0, the steps amplify a permitted difference of 1e-6 beyond the tolerance
_CLIP_TOLERANCE = 1e-6  # torch adds 1e-6 to a norm before it divides by it, which need not be imitated
SCHEDULES = ("gpipe", "1f1b", "interleaved")


def drawn(attempt: Attempt, schedule: str, case: Stack) -> Stack:
    """Draw how many micro-batches, samples and layers there are."""
    size, number = attempt.world_size, attempt.random.randint
    micro_batches = size * number(1, 2) if schedule == "interleaved" else number(1, 8)
    at_least = 2 * size if schedule == "interleaved" else size
    layers = number(at_least, at_least + 4)
    return replace(case, schedule=schedule, micro_batches=micro_batches, samples=number(1, 2), layers=layers)


def judge_all(attempt: Attempt, case: Stack, in_groups: bool = False) -> None:
    for trained in train(attempt, case, in_groups=in_groups):
        judge_layout(trained)
        judge_training(trained)


def judge_scale(trained: Trained, case: Stack) -> None:
    """Check that the loss of the first step is neither 0 nor m times too large.

    Raises:
        Wrong: If it is. The message says so.
    """
    expected, times = trained.expected[0].loss, case.micro_batches
    for rank, result in trained.found.items():
        loss = result.steps[0].loss
        if loss is None or loss.shape != expected.shape:
            continue
        message = f"{trained.at(0)}, the loss is {loss.item():.10g}, expected {expected.item():.10g}"
        if times > 1 and nearly_equal(loss, times * expected):
            evidence = f"{message}, so it is {times} times too large, and there are {times} micro-batches"
            raise Wrong({rank: evidence}, "Hint: the losses of all micro-batches are added up. What makes that a mean?")
        if not loss:
            raise Wrong({rank: message}, "Hint: does the last chunk append the loss of every micro-batch?")


def every_schedule_trains(attempt: Attempt) -> None:
    for schedule in SCHEDULES:
        judge_all(attempt, drawn(attempt, schedule, Stack(narrows=True)))


def messages_are_as_the_formula_says(attempt: Attempt) -> None:
    for schedule in SCHEDULES:
        for trained in train(attempt, replace(drawn(attempt, schedule, Stack()), warm=True), longer=False):
            judge_traffic(trained)


@dataclass(frozen=True)
class Loop:
    """A training loop: AdamW, or SGD on gradients that are clipped."""

    case: Stack
    max_norm: float | None = None
    in_subgroup: bool = False
    steps: int = STEPS
    learning_rate_factor: float = 1.0

    def __str__(self) -> str:
        how = "AdamW" if self.max_norm is None else f"SGD, max_norm {self.max_norm:g}"
        return f"{how}, {self.case}"

    @property
    def tolerance(self) -> float:
        return _ADAM_TOLERANCE if self.max_norm is None else _CLIP_TOLERANCE

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        if not parameters:
            return None
        if self.max_norm is None:
            return torch.optim.AdamW(parameters, **_ADAM)
        return torch.optim.SGD(parameters, _SGD_LR * self.learning_rate_factor)

    def batches(self, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.case.draw_batch(generator) for _ in range(self.steps)]


@dataclass
class Looped:
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)  # those of clipping, by step
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end


def probe_loop(pipeline, loop: Loop, seed: int, batches: list) -> Looped | None:
    """Train on this rank, if it is in the group."""
    group, is_member = join_subgroup(loop.in_subgroup)
    if not is_member:
        return None
    with staying_inside(dist.get_process_group_ranks(group) if loop.in_subgroup else None):
        return run_loop(loop.case.split(pipeline, loop.case.build_model(seed).to(device_here()), group), loop, batches)


def run_loop(split, loop: Loop, batches: list) -> Looped:
    parameters = list({id(p): p for p in split.stage_parameters().values()}.values())
    optimizer, found = loop.optimizer(parameters), Looped()
    for x, y in batches:
        for parameter in parameters:
            parameter.grad = None
        found.losses.append(split.step(x.to(device_here()), y.to(device_here())).detach().cpu())
        if loop.max_norm is not None:
            with instrumentation.listening() as calls:
                norm = split.clip_grad_norm_(loop.max_norm)
            found.norms.append(torch.as_tensor(norm).detach().cpu())
            found.calls.append(calls)
        if optimizer:
            optimizer.step()
    found.parameters = {name: p.detach().cpu().clone() for name, p in split.stage_parameters().items()}
    return found


def train_loop_and_judge(attempt: Attempt, loop: Loop) -> dict[int, Looped]:
    """Train as one process does, with a plain optimizer.

    Returns:
        The results of probe_loop, by global rank.

    Raises:
        Wrong: If a loss, a norm or a parameter differs.
    """
    loop = replace(loop, steps=attempt.sizes.steps(loop.steps), learning_rate_factor=attempt.sizes.learning_rate_factor)
    seed, batches = attempt.draw_seed(), loop.batches(attempt.draw_seed())
    context = str(loop) + (f", {called_alone(attempt)}" if loop.in_subgroup else "")
    by_rank = attempt.run(probe_loop, loop, seed, batches, context=context)
    results = {rank: by_rank[rank] for rank in members_of(attempt, loop.in_subgroup)}
    model = loop.case.build_model(seed)
    optimizer = loop.optimizer(list(model.parameters()))
    assert optimizer is not None  # The model has parameters.
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = loop.case.loss_of(model(x), y)
        loss.backward()
        if loop.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm)
            _judge_norms(results, norm, loop, index)
        optimizer.step()
        for rank, found in results.items():
            if not nearly_equal(found.losses[index], loss.detach(), loop.tolerance):
                message = f"{loop}, step {index + 1}: the loss is {found.losses[index]:.8g}, expected {loss:.8g}"
                raise Wrong({rank: message}, "Hint: which parameters have an incomplete gradient?")
    whole = dict(model.named_parameters())
    for rank, found in results.items():
        for name, parameter in found.parameters.items():
            if not nearly_equal(parameter, whole[name].detach(), loop.tolerance):
                difference = first_difference(parameter, whole[name].detach(), loop.tolerance)
                raise Wrong({rank: f"{loop}, after {loop.steps} steps, {name}: {difference}"})
    return results


def _judge_norms(results: dict[int, Looped], expected: torch.Tensor, loop: Loop, index: int) -> None:
    for rank, found in results.items():
        norm = found.norms[index]
        if norm.shape != ():
            message = f"{loop}: the norm has the shape {list(norm.shape)}, expected a tensor without dimensions"
            raise Wrong({rank: message}, "Hint: what is the shape of the tensor to which you add the squares?")
        if not nearly_equal(norm.double(), expected.double(), loop.tolerance):
            message = f"{loop}, step {index + 1}: the norm is {norm.tolist()}, expected {expected.item():.8g}"
            raise Wrong({rank: message}, "Hint: which gradients does the sum contain, and how often?")


def adamw_equals_one_process(attempt: Attempt) -> None:
    train_loop_and_judge(attempt, Loop(drawn(attempt, "1f1b", Text())))


a_plain_norm_is_clipped = on_each(train_loop_and_judge, Loop(Stack(layers=4), CLIPS))


def clipping_equals_one_process(attempt: Attempt) -> None:
    for max_norm in (CLIPS, 1000.0):
        train_loop_and_judge(attempt, Loop(drawn(attempt, "1f1b", Text()), max_norm))
    train_loop_and_judge(attempt, Loop(drawn(attempt, "interleaved", Stack(frozen=True)), CLIPS))


def many_ties_are_counted_once(attempt: Attempt) -> None:
    """Clip where more than two stages share a weight, or where the first stage is not among them."""
    for case in (Stack("1f1b", all_tied=True), Stack("1f1b", woven=True)):
        train_loop_and_judge(attempt, Loop(case, CLIPS))


clipping_stays_in_its_group = on_each(train_loop_and_judge, Loop(Stack(layers=5), CLIPS, in_subgroup=True))


def clipping_sends_one_element(attempt: Attempt) -> None:
    for rank, found in train_loop_and_judge(attempt, Loop(Stack(layers=5, tied=True), CLIPS)).items():
        for calls in found.calls:
            if [(call.op, call.payload_bytes) for call in calls] != [("all_reduce", 8)]:
                message = f"clip_grad_norm_: {describe_calls(calls)}; expected 1 all_reduce of 8 bytes"
                raise Wrong({rank: message}, "Hint: what do the other stages need to know?")


def tied_models_train(attempt: Attempt) -> None:
    judge_all(attempt, drawn(attempt, "gpipe", Stack(tied=True)))
    judge_all(attempt, drawn(attempt, "1f1b", Text()))
    judge_all(attempt, drawn(attempt, "interleaved", Text()))


def many_ties_train(attempt: Attempt) -> None:
    """Train where more than two stages share a weight, and where a stage shares two weights."""
    for case in (Stack("1f1b", all_tied=True), Stack("1f1b", woven=True)):
        judge_all(attempt, case)


def probe_equal(pipeline, case: Stack, seed: int, batches: list) -> list[torch.Tensor]:
    """Train on this rank. Returns the gradients of tied parameters after each step."""
    split = case.split(pipeline, case.build_model(seed).to(device_here()), None)
    found = []
    for x, y in batches:
        for parameter in split.stage_parameters().values():
            parameter.grad = None
        split.step(x.to(device_here()), y.to(device_here()))
        found += [p.grad.cpu().clone() for name, p in split.stage_parameters().items() if name == "0.weight"]
    return found


def copies_stay_equal(attempt: Attempt) -> None:
    """Compare the bits of a tied parameter's gradients on all stages that have it."""
    case = Stack(layers=9, all_tied=True, micro_batches=3)
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    batches = [case.draw_batch(generator) for _ in range(3)]
    results = attempt.run(probe_equal, case, attempt.draw_seed(), batches)
    found = {rank: each for rank, each in enumerate(results) if each}
    first = next(iter(found.values()))
    for rank, gradients in found.items():
        for index, (own, other) in enumerate(zip(gradients, first, strict=True)):
            if not torch.equal(own, other):
                message = f"step {index + 1}: the tied weight's gradient differs in bits from the first stage's"
                raise Wrong({rank: message}, "Hint: in which order does each stage add up the gradients?")


def only_holders_exchange(attempt: Attempt) -> None:
    for trained in train(attempt, Stack(tied=True, warm=True, layers=9), longer=False):
        judge_traffic(trained)


def groups_work_side_by_side(attempt: Attempt) -> None:
    judge_all(attempt, drawn(attempt, "1f1b", Stack(layers=5, tied=True)), in_groups=True)


@rehearsed
def probe_late(pipeline, case: Stack, token: int, late: int, seed: int, batch: tuple) -> list[int]:
    """Let the second stage begin late. Returns, on it, the ranks that had not run all forwards by then."""
    model, meeting, missing = case.build_model(seed).to(device_here()), Rendezvous(f"stage{token}"), []
    runs = [0]

    def count(_layer, _inputs, _output) -> None:
        runs[0] += 1
        if runs[0] == case.micro_batches:
            meeting.arrive(with_the_stream=False)

    split = case.split(pipeline, model, None)
    if dist.get_rank() == 0:
        next(model.children()).register_forward_hook(count)
    with launches_unasked():
        if dist.get_rank() == late:
            missing = meeting.missing()
        split.step(*(each.to(device_here()) for each in batch))
    return missing


def the_first_stage_does_not_wait(attempt: Attempt) -> None:
    case = Stack("gpipe", micro_batches=6, layers=2, width=256)
    generator, token = torch.Generator().manual_seed(attempt.draw_seed()), attempt.draw_seed()
    batch = case.draw_batch(generator)
    if attempt.run(probe_late, case, token, 1, attempt.draw_seed(), batch)[1]:
        evidence = f"while stage 1 was late, stage 0 did not run its 6 forwards within {PATIENCE_S:g} s"
        raise Wrong({0: evidence}, "Hint: does stage 0 wait for a message although its next action needs none?")


def probe_forwards(pipeline, case: Stack, seed: int, batch: tuple) -> dict[str, int]:
    """Run a step on this rank. Returns how often each layer has computed."""
    model, runs = case.build_model(seed).to(device_here()), Counter()
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *_, name=name: runs.update([name]))
    case.split(pipeline, model, None).step(*(each.to(device_here()) for each in batch))
    return dict(runs)


def each_layer_computes_once(attempt: Attempt) -> None:
    case = Stack("1f1b", layers=6)
    batch = case.draw_batch(torch.Generator().manual_seed(attempt.draw_seed()))
    for rank, runs in enumerate(attempt.run(probe_forwards, case, attempt.draw_seed(), batch)):
        for name, found in runs.items():
            if found > case.micro_batches:
                message = f"layer {name} computed {found} forwards for {case.micro_batches} micro-batches"
                raise Wrong({rank: message}, "Hint: how often does run() call run_forward for the same micro-batch?")


@dataclass
class Bf16Step:
    dtypes: dict[str, torch.dtype]  # of the gradients
    sent_bytes: list[int]  # by message
    loss: torch.Tensor


def probe_bf16(pipeline, case: Stack, seed: int, batch: tuple) -> Bf16Step:
    """Run a step in bf16 on this rank."""
    model = case.build_model(seed).to(device_here(), torch.bfloat16)
    split = case.split(pipeline, model, None)
    x, y = (each.to(device_here(), torch.bfloat16 if each.is_floating_point() else each.dtype) for each in batch)
    split.step(x, y)
    with instrumentation.listening() as calls:
        loss = split.step(x, y)
    dtypes = {name: p.grad.dtype for name, p in split.stage_parameters().items() if p.grad is not None}
    return Bf16Step(dtypes, [call.payload_bytes for call in calls if call.op == "send"], loss.cpu())


def bf16_stays_bf16(attempt: Attempt) -> None:
    case = Stack("1f1b", layers=6)
    batch = case.draw_batch(torch.Generator().manual_seed(attempt.draw_seed()))
    nbytes = case.samples * batch[0][0].numel() * 2
    for rank, found in enumerate(attempt.run(probe_bf16, case, attempt.draw_seed(), batch)):
        wrong = [name for name, dtype in found.dtypes.items() if dtype != torch.bfloat16]
        if wrong:
            dtype = found.dtypes[wrong[0]]
            raise Wrong({rank: f"in bf16, the gradient of {wrong[0]} is {dtype}; expected bfloat16"})
        if any(sent != nbytes for sent in found.sent_bytes):
            message = f"in bf16, a message has {max(found.sent_bytes)} bytes, expected {nbytes}"
            raise Wrong({rank: message}, "Hint: which dtype does each message have?")
        if not found.loss.isfinite():
            raise Wrong({rank: f"in bf16, the loss is {found.loss.item()}; expected it to be finite"})


def postponed_weights_train(attempt: Attempt) -> None:
    """Train with a schedule that is not one of the lab's, because exercise 15.9 comes later."""
    judge_all(attempt, drawn(attempt, WEIGHTS_LAST, Stack()))
    judge_all(attempt, drawn(attempt, WEIGHTS_LAST, Text(tied=False)))
