"""Train a wrapper on ranks and compare it with one process that has all the data.

The kernel draws the model's weights and the batch. Only rank 0 gets the right weights, while the others build their
own, and each rank gets only its own samples. So the right gradients can only come from communication.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import (
    describe_calls,
    first_difference,
    judge_gradients,
    judge_state,
    nearly_equal,
    reject_frozen_gradients,
    tolerance_of,
    total_of,
)
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.checks.models import awkward
from shared.wire import instrumentation

SAMPLES_PER_RANK = 6
STEPS = 3
LEARNING_RATE = 0.1


class Draw:
    """The seeds and samples of one attempt. Every rank has a seed of its own, and the right weights are rank 0's."""

    def __init__(self, attempt: Attempt, samples_of_rank: list[int] | None = None):
        counts = samples_of_rank or [SAMPLES_PER_RANK] * attempt.world_size
        self.seeds = [attempt.draw_seed() for _ in counts]
        self.x, self.y = awkward.draw_batch(attempt.draw_seed(), sum(counts))
        self.shares = list(zip(self.x.split(counts), self.y.split(counts), strict=True))
        self.per_rank = [(seed, x, y) for seed, (x, y) in zip(self.seeds, self.shares, strict=True)]

    def samples_of(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of these ranks, concatenated."""
        x, y = (torch.cat([self.shares[rank][part] for rank in members]) for part in (0, 1))
        return x, y

    def batches_of(self, members: list[int], module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what one process computes at a time: all samples of these ranks, or each rank's own samples.

        The latter is for modules with BatchNorm, which each rank applies to its own samples, as in torch's DDP.
        """
        if awkward.mixes_samples(module):
            return [self.shares[rank] for rank in members]
        return [self.samples_of(members)]


@dataclass(frozen=True)
class Training:
    """How a wrapper is built and trained."""

    model: str
    micro_batches: int = 1
    steps: int = STEPS
    learning_rate: float = LEARNING_RATE
    in_subgroup: bool = False
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict)  # keyword arguments of the wrapper's constructor besides `group`
    overlaps: bool = False  # backward() launches collectives, so .grad is not the rank's own gradient after it
    finishes: bool = True  # finish_gradient_sync() is called in each step


# -- on a rank


def frozen_with_gradient(module) -> list[str]:
    return [name for name, p in module.named_parameters() if not p.requires_grad and p.grad is not None]


@dataclass
class TrainedStep:
    """What a rank recorded of one step."""

    local: dict[str, torch.Tensor | None]  # the gradients of its own samples
    gradients: dict[str, torch.Tensor | None]  # after finish_gradient_sync()
    working: list[instrumentation.Call]  # in forward and backward
    finishing: list[instrumentation.Call]  # in finish_gradient_sync()


@dataclass
class Trained:
    """What a rank recorded of a training."""

    building: list[instrumentation.Call]  # in the wrapper's constructor
    wraps_module: bool  # whether .module is the module
    start: dict[str, torch.Tensor]  # the module's state
    end: dict[str, torch.Tensor]
    steps: list[TrainedStep]
    frozen: list[str]  # the frozen parameters that have a gradient after the last step
    evaluated: torch.Tensor  # the output in eval mode at the end


def probe_training(wrapper, how: Training, seed: int, x, y) -> Trained | None:
    """Wrap a model and train it with SGD. Returns None on a rank that does not take part."""
    group, member = join_subgroup(how.in_subgroup)
    module = awkward.build(how.model, seed, how.dtype).to(device_here())
    if not member:
        return None
    options = how.options | ({"group": group} if how.in_subgroup else {})
    with instrumentation.listening() as building:
        wrapped = wrapper(module, **options)
    _refuse_library_wrappers(wrapped)
    start, wraps_module = awkward.state_of(module), getattr(wrapped, "module", None) is module
    steps, frozen = [], []
    inputs, y = x.to(device_here(), how.dtype), y.to(device_here(), how.dtype)
    x = inputs
    for _ in range(how.steps):
        _drop_gradients(module)
        plain = awkward.twin_of(how.model, module) if how.overlaps else module
        with instrumentation.listening() as working:
            _accumulate(wrapped, x, y, how.micro_batches)
        if how.overlaps:
            _accumulate(plain, x, y, how.micro_batches)
        local = awkward.gradients_of(plain)
        with instrumentation.listening() as finishing:
            if how.finishes:
                wrapped.finish_gradient_sync()
        gradients = awkward.gradients_of(module)
        steps.append(TrainedStep(local, gradients, working, finishing))
        frozen = frozen_with_gradient(module)
        descend(module.parameters(), how.learning_rate)
        x = awkward.other_branches(x)
    wrapped.eval()
    with torch.no_grad():
        evaluated = wrapped(inputs).cpu()
    return Trained(building, wraps_module, start, awkward.state_of(module), steps, frozen, evaluated)


def _drop_gradients(module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = None


def descend(parameters: Iterable[torch.Tensor], learning_rate: float = LEARNING_RATE) -> None:
    """Take one step of SGD. torch's own optimizers first import the compiler, which takes a second in every kernel."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-learning_rate)


def _accumulate(module, x, y, micro_batches: int) -> None:
    for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        (awkward.loss_of(module, part_x, part_y) / micro_batches).backward()


def _refuse_library_wrappers(wrapped) -> None:
    for part in [wrapped, *wrapped.modules()]:
        if any(base.__module__.startswith("torch.nn.parallel") for base in type(part).__mro__):
            raise AssertionError("this wrapper uses torch's own DistributedDataParallel: write it by hand")


# -- in the kernel


@dataclass(frozen=True)
class Step:
    """What one process computes in one step. The lists have one entry per batch."""

    gradients: dict[str, torch.Tensor | None]  # the mean over the batches
    own: list[dict[str, torch.Tensor | None]]
    states: list[dict[str, torch.Tensor]]  # after the step


def one_process(
    module: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    steps: int = STEPS,
    micro_batches: int = 1,
    idle: tuple[tuple[int, int], ...] = (),
    learning_rate: float = LEARNING_RATE,
) -> list[Step]:
    """Train the module with SGD in this process, on the mean of the batches' gradients.

    Args:
        module: The module, which is changed.
        batches: The full batch, or each rank's samples; see Draw.batches_of.
        steps: The number of steps.
        micro_batches: The number of parts in which each batch is computed.
        idle: The (batch, step) pairs in which a batch is left out. Its gradients count as zeros.
        learning_rate: The learning rate of SGD.
    """
    replicas, found = awkward.Replicas(module, len(batches)), []
    for step in range(steps):
        own = []
        for index, (replica, (x, y)) in enumerate(zip(replicas, batches, strict=True)):
            _drop_gradients(module)
            if (index, step) not in idle:
                _accumulate(replica, x, y, micro_batches)
            own.append(awkward.gradients_of(module))
        mean = {name: _mean([gradients[name] for gradients in own]) for name in own[0]}
        for name, parameter in module.named_parameters():
            parameter.grad = mean[name]
        descend(module.parameters(), learning_rate)
        found.append(Step(mean, own, [replicas.state_of(index) for index in range(len(batches))]))
        batches = [(awkward.other_branches(x), y) for x, y in batches]
    return found


def _mean(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Average gradients. A missing one counts as zeros."""
    known = [gradient for gradient in gradients if gradient is not None]
    return total_of(known) / len(gradients) if known else None


def train(attempt: Attempt, how: Training, draw: Draw) -> list[Trained]:
    """Train on the ranks and return what each rank has found: None if it does not take part."""
    context = called_alone(attempt) if how.in_subgroup else ""
    attempt.sizes.has_models = True  # on the ranks, even if these fail before this process builds one, too
    return attempt.run(probe_training, how, per_rank=draw.per_rank, context=context)


def train_and_judge(attempt: Attempt, how: Training) -> list[Trained]:
    """Train on fresh data and return what probe_training found on each rank.

    Raises:
        Wrong: If the training differs from that of one process.
    """
    rate = LEARNING_RATE * attempt.sizes.learning_rate_factor
    how, draw = replace(how, steps=attempt.sizes.steps(how.steps), learning_rate=rate), Draw(attempt)
    found = train(attempt, how, draw)
    if how.dtype == torch.bfloat16:
        judge_bf16_training(found, how)
    else:
        judge_training(attempt, found, how, draw)
    return found


def judge_start(attempt: Attempt, how: Training) -> None:
    """Check that every rank starts with rank 0's state, in the module itself.

    Raises:
        Wrong: If one does not.
    """
    draw = Draw(attempt)
    found = train(attempt, how, draw)
    strangers = [rank for rank, result in enumerate(found) if not result.wraps_module]
    if strangers:
        hint = "Hint: whose parameters does an optimizer train that was built from the module?"
        raise Wrong(dict.fromkeys(strangers, "the wrapper's .module is not the module that it was given"), hint)
    own = {rank: awkward.state_of(awkward.build(how.model, seed)) for rank, seed in enumerate(draw.seeds)}
    judge_state({rank: result.start for rank, result in enumerate(found)}, own[0], 0, own)


def judge_training(attempt: Attempt, found: list[Trained], how: Training, draw: Draw) -> None:
    """Compare the training on every rank that took part with that of one process.

    Raises:
        Wrong: If the gradients of a step, the final state, or the final output in eval mode differ.
    """
    members = members_of(attempt, how.in_subgroup)
    module = awkward.build(how.model, draw.seeds[members[0]])
    batches = draw.batches_of(members, module)
    context = f"{called_alone(attempt)}, " if how.in_subgroup else ""
    context += awkward.describe(how.model)
    steps = one_process(module, batches, how.steps, how.micro_batches, learning_rate=how.learning_rate)
    for step_index, expected in enumerate(steps):
        gradients = {rank: found[rank].steps[step_index].gradients for rank in members}
        local = {rank: found[rank].steps[step_index].local for rank in members}
        try:
            judge_gradients(gradients, expected.gradients, local, f"{context}, step {step_index + 1}")
        except Wrong as wrong:
            if step_index == 0 and how.model in awkward.HAVE_MODES and _evaluates(gradients, how, draw, members):
                wrong.hint = "This is the gradient in eval mode. Hint: which line changes the module's mode, and when?"
            elif _is_mean(gradients, local, tolerance_of(expected.gradients.values())):
                wrong.hint = _WRONG_BEFORE
            raise
    reject_frozen_gradients({rank: found[rank].frozen for rank in members}, how.model)
    ends = steps[-1].states * (len(members) // len(batches))
    for rank, expected in zip(members, ends, strict=True):
        _judge_end(rank, found[rank].end, expected, context)
        evaluated = awkward.evaluate(module, expected, draw.shares[rank][0])
        if not nearly_equal(found[rank].evaluated, evaluated, tolerance_of(expected.values())):
            message = f"the output in eval mode is wrong: {first_difference(found[rank].evaluated, evaluated)}"
            raise Wrong({rank: f"{context}: {message}"}, awkward.HINT_ON_MODES)
    same = ends[0] if len(batches) == 1 else dict(module.named_parameters())
    states = {rank: {name: found[rank].end[name] for name in same} for rank in members}
    judge_state(states, states[members[0]], members[0])


_WRONG_BEFORE = (
    "The ranks averaged what they had in .grad, but that was already wrong. Hint: do all ranks have the same weights, "
    "and which lines change .grad before it is averaged?"
)


def _is_mean(found: dict[int, dict], local: dict[int, dict], tolerance: float) -> bool:
    """Return whether every gradient is the mean of what the ranks had after backward."""
    means = {name: _mean([own[name] for own in local.values()]) for name in next(iter(local.values()))}
    known = {name: mean for name, mean in means.items() if mean is not None}
    pairs = [(gradients[name], mean) for gradients in found.values() for name, mean in known.items()]
    return bool(pairs) and all(own is not None and nearly_equal(own, mean, tolerance) for own, mean in pairs)


def _evaluates(gradients: dict[int, dict], how: Training, draw: Draw, members: list[int]) -> bool:
    """Return whether the gradients of the first step are those that the module has in eval mode."""
    module = awkward.build(how.model, draw.seeds[members[0]]).eval()
    (step,) = one_process(module, [draw.samples_of(members)], steps=1)
    pairs = [(own[name], expected) for own in gradients.values() for name, expected in step.gradients.items()]
    return all(own is not None and expected is not None and nearly_equal(own, expected) for own, expected in pairs)


def _judge_end(rank: int, end: dict[str, torch.Tensor], reference: dict, context: str) -> None:
    tolerance = tolerance_of(reference.values())
    for name, expected in reference.items():
        state = end[name].double()
        if not nearly_equal(state, expected.double(), tolerance):
            message = f"{context}: {name} after the last step, {first_difference(state, expected.double(), tolerance)}"
            raise Wrong({rank: message}, awkward.HINT_ON_FORWARDS if awkward.is_statistic(name) else "")


def judge_bf16_training(found: list[Trained], how: Training) -> None:
    """Check gradients in bfloat16: their dtype, their bytes on the wire, and that they are the mean within rounding.

    The mean of N bfloat16 values, added in any order, is wrong by at most N · 2⁻⁸ times the largest value.

    Raises:
        Wrong: If one of these does not hold.
    """
    half = sum(p.nbytes for p in awkward.build(how.model, 0, torch.bfloat16).parameters())
    for name, step_index in [(name, step_index) for name in found[0].start for step_index in range(how.steps)]:
        steps = [result.steps[step_index] for result in found]
        own = [step.local[name] for step in steps]
        if all(gradient is None for gradient in own):
            raise Wrong(
                f"after backward(), {name} of the wrapped module has no gradient on any rank",
                "Hint: which module does forward() run?",
            )
        local = torch.stack([torch.zeros_like(found[0].start[name]) if g is None else g for g in own]).double()
        for rank, step in enumerate(steps):
            gradient = step.gradients[name]
            if gradient is None:
                evidence = f"after finish_gradient_sync(), the gradient of {name} is None; expected the mean"
                raise Wrong({rank: evidence}, "Hint: which line should set it?")
            calls = [*(step.working if how.overlaps else []), *step.finishing]
            if sum(call.payload_bytes for call in calls) not in (half, 2 * half):
                raise Wrong(
                    {rank: f"{describe_calls(calls)}; expected {half} bytes, which is the size of the bf16 gradients"}
                )
            if gradient.dtype != torch.bfloat16:
                raise Wrong({rank: f"the gradient of {name} is {gradient.dtype}; expected bfloat16, the parameter's"})
            tolerance = len(found) * 2**-8 * max(1.0, local.abs().max().item())
            if not nearly_equal(gradient, local.mean(0), tolerance):
                raise Wrong({rank: f"{name}: {first_difference(gradient, local.mean(0), tolerance)}"})
