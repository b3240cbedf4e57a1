"""Call the functions of chapter 02 on a rank, and check average_gradients_weighted, in exercise 2.5."""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, judge_gradients, nearly_equal, reject_frozen_gradients
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import trainable_bytes
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw, frozen_with_gradient, one_process
from shared.checks.models import awkward
from shared.wire import instrumentation

# -- call the functions of chapter 02 on a rank, and record their results and messages


@dataclass
class Mean:
    value: torch.Tensor
    calls: list[instrumentation.Call]


@dataclass
class Broadcast:
    state: dict[str, torch.Tensor]
    calls: list[instrumentation.Call]
    kept: bool  # whether all tensors are the same objects as before, at the same addresses


@dataclass
class Averaged:
    gradients: dict[str, torch.Tensor | None]
    local: dict[str, torch.Tensor | None]  # the gradients before they were averaged
    calls: list[instrumentation.Call]
    frozen: list[str]  # the frozen parameters that have a gradient


def probe_mean(mean_over_ranks_, in_subgroup: bool, values: torch.Tensor) -> Mean:
    group, member = join_subgroup(in_subgroup)
    given = values.to(device_here())
    tensor = given[...]  # a view, so that a mean that is not computed in place is noticed
    with instrumentation.listening() as calls:
        if member:
            mean_over_ranks_(tensor, group) if in_subgroup else mean_over_ranks_(tensor)
    return Mean(given.cpu().clone(), calls)


def probe_broadcast(broadcast_state, model: str, in_subgroup: bool, seed: int) -> Broadcast:
    group, member = join_subgroup(in_subgroup)
    module = awkward.build(model, seed).to(device_here())
    marked = _marks(module)
    with instrumentation.listening() as calls:
        if member:
            broadcast_state(module, group)
    return Broadcast(awkward.state_of(module), calls, marked == _marks(module))


def _marks(module: nn.Module) -> list[tuple]:
    """List which object each tensor is, where its elements are, and whether it is trained."""
    return [(id(t), t.data_ptr(), t.requires_grad) for t in chain(module.parameters(), module.buffers())]


def probe_average(
    average_gradients, model: str, in_subgroup: bool, seed: int, x, y, *extra, old_gradients: bool = False
) -> Averaged:
    """Run backward, then the student's function.

    Args:
        average_gradients: The student's function.
        model: The name of the model.
        in_subgroup: Whether only the ranks of a group call the function.
        seed: The seed of the model's weights.
        extra: The function's arguments between the module and the group.
        old_gradients: Whether frozen parameters have a gradient from before they were frozen.
    """
    group, member = join_subgroup(in_subgroup)
    module = awkward.build(model, seed).to(device_here())
    if len(x):
        awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    for parameter in module.parameters():
        if old_gradients and not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    local = awkward.gradients_of(module)
    with instrumentation.listening() as calls:
        if member:
            average_gradients(module, *extra, group)
    recorded = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.requires_grad]
    if recorded:
        raise AssertionError(
            f"the .grad of {recorded[0]} requires a gradient itself: which operation in your code does autograd record?"
        )
    return Averaged(awkward.gradients_of(module), local, calls, frozen_with_gradient(module))


def probe_average_beside_old_gradients(average_gradients, *args) -> Averaged:
    return probe_average(average_gradients, *args, old_gradients=True)


def probe_many_samples(average_gradients_weighted, own: float, samples: int) -> float:
    """Average a float64 gradient, in a module whose first parameter is in bf16, which rounds numbers above 256."""
    dtypes = torch.bfloat16, torch.float64
    module = nn.ParameterList(torch.zeros(2, dtype=dtype, device=device_here()) for dtype in dtypes)
    for parameter in module:
        parameter.grad = torch.full_like(parameter, own)
    average_gradients_weighted(module, samples)
    return module[1].grad[0].item()


def gradients_of_one_process(model: str, draw: Draw, members: list[int]) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the members' samples, computed together in one process."""
    (step,) = one_process(awkward.build(model, draw.seeds[0]), [draw.samples_of(members)], steps=1)
    return step.gradients


def judge_averages(found: list[Averaged], expected: dict, members: list[int], context: str) -> None:
    gradients, local = {rank: found[rank].gradients for rank in members}, {rank: found[rank].local for rank in members}
    judge_gradients(gradients, expected, local, context)


def _weighted(attempt: Attempt, model: str, counts: list[int], in_subgroup: bool) -> tuple[list[Averaged], dict, Draw]:
    """Average gradients over unequal shares. Returns each rank's results, one process's gradients, and the draw."""
    draw = Draw(attempt, counts)
    members = members_of(attempt, in_subgroup)
    args = [(draw.seeds[0], x, y, len(x)) for x, y in draw.shares]
    context = f"{awkward.describe(model)}, shares of {', '.join(map(str, counts))} samples"
    found = attempt.run(
        probe_average, model, in_subgroup, per_rank=args, context=called_alone(attempt) if in_subgroup else ""
    )
    expected = gradients_of_one_process(model, draw, members)
    _refuse_plain_mean(found, expected, members, context)
    try:
        judge_averages(found, expected, members, context)
    except Wrong as wrong:
        if in_subgroup:
            wrong.hint = f"{wrong.hint} (Only the samples of the group's ranks count.)".strip()
        raise
    reject_frozen_gradients({rank: each.frozen for rank, each in enumerate(found)}, model)
    return found, expected, draw


def _refuse_plain_mean(found: list[Averaged], expected: dict, members: list[int], context: str) -> None:
    name = "first.weight"  # trainable and used in every model
    local = [found[rank].local[name] for rank in members]
    plain = torch.stack([torch.zeros_like(expected[name]) if own is None else own for own in local]).mean(0)
    got = found[members[0]].gradients[name]
    if got is not None and nearly_equal(got, plain) and not nearly_equal(plain, expected[name]):
        raise Wrong(
            f"{context}: the gradient of {name} is the unweighted mean over the ranks",
            "Hint: how much does each sample count in that mean?",
        )


def unequal_shares_weigh_by_their_samples(attempt: Attempt) -> None:
    for model in ("Frozen", "TwoBranches", "Strided", "Mixed"):
        counts = [attempt.random.randint(1, 9) for _ in range(attempt.world_size)]
        if attempt.world_size > 1 and model == "TwoBranches":
            counts[attempt.random.randrange(attempt.world_size)] = 0  # no samples, so no backward
        _weighted(attempt, model, counts, False)


def many_samples_are_counted_exactly(attempt: Attempt) -> None:
    samples = [attempt.random.randrange(257, 512, 2) for _ in range(attempt.world_size)]
    own = [float(value) for value in attempt.random.sample(range(1, 10), attempt.world_size)]  # no two are equal
    expected = sum(value * count for value, count in zip(own, samples, strict=True)) / sum(samples)
    found = attempt.run(probe_many_samples, per_rank=list(zip(own, samples, strict=True)))
    for rank, gradient in enumerate(found):
        if not abs(gradient - expected) <= 1e-5 * expected:  # This finds nan, too.
            shares = ", ".join(map(str, samples))
            message = f"shares of {shares} samples, the first parameter is in bf16, the other in float64"
            hint = "Hint: by which factor do you multiply each gradient, and how many times do you divide it?"
            if abs(gradient - expected) < 0.02 * expected:  # as if some counts were rounded to bf16
                hint = "Hint: which dtype does the tensor with the number of samples have, and which numbers are exact?"
            raise Wrong({rank: f"{message}: the float64 gradient is {gradient:.6g}, expected {expected:.6g}"}, hint)


def only_the_groups_samples_count(attempt: Attempt) -> None:
    _weighted(attempt, "Plain", [attempt.random.randint(1, 9) for _ in range(attempt.world_size)], True)


def weighing_costs_one_small_message(attempt: Attempt) -> None:
    for model in ("Plain", "Frozen"):
        found, _, _ = _weighted(attempt, model, [3] * attempt.world_size, False)
        trained = sum(p.requires_grad for p in awkward.build(model, 0).parameters())
        want_bytes, most = trainable_bytes(model), 1 + trained
        for rank, result in enumerate(found):
            extra = sum(call.payload_bytes for call in result.calls) - want_bytes
            if not 0 <= extra <= 8 or len(result.calls) > most:
                expected = f"at most {most} messages, {want_bytes} bytes plus one element"
                message = f"{awkward.describe(model)}: {describe_calls(result.calls)}; expected {expected}"
                raise Wrong({rank: message}, "Hint: what must a rank know about the others besides their gradients?")
