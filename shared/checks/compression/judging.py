"""Draw gradients for every rank and step, feed them to a student's compressor, and judge what every rank gets."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shared.checks.compression import hints
from shared.checks.compression.feeding import MB, Gradients, Setting, counted, probe_feeding, probe_two_models
from shared.checks.compression.hints import Steps, Tried
from shared.checks.compression.quantizing import BLOCK, LEVELS
from shared.checks.compression.references import Method, matrix_of, numel_of
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import first_difference, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import called_alone, members_of

_SLACK = 1.1  # of the bound on rounding errors

# -- drawing


def draw_steps(
    attempt: Attempt,
    method,
    setting: Setting,
    count: int,
    micro_batches: int = 1,
    unused: Callable[[int, int, int], bool] = lambda step, rank, index: False,
) -> Steps:
    """Draw gradients of very different sizes.

    Args:
        method: If it has a low rank, the mean of each matrix in the first step has this rank, and each rank's own
            gradient does not.
        count: The number of steps.
        micro_batches: The number of micro-batches per step.
        unused: Tells whether a rank leaves out a parameter in a step.
    """
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    members = members_of(attempt, setting.in_subgroup)
    sizes = [10.0 ** attempt.random.uniform(-2, 1) for _ in setting.shapes]

    def gradient(index: int) -> torch.Tensor:
        return sizes[index] * torch.randn(setting.shapes[index], generator=generator, dtype=torch.float64)

    def micro_batch(step: int, rank: int) -> Gradients:
        return [None if unused(step, rank, index) else gradient(index) for index in range(len(setting.shapes))]

    steps = [
        [[micro_batch(step, rank) for _ in range(micro_batches)] for rank in range(len(members))]
        for step in range(count)
    ]
    if method.low_rank:
        for index, shape in enumerate(setting.shapes):
            if matrix := matrix_of(shape, method.low_rank):
                _make_low_rank(steps[0], index, matrix, method.low_rank, generator)
    return steps


def _make_low_rank(step: list, index: int, matrix: tuple[int, int], rank: int, generator: torch.Generator) -> None:
    """Change one gradient of a step so that the sum over ranks and micro-batches has this rank."""
    every = [gradients for micro_batches in step for gradients in micro_batches if gradients[index] is not None]
    if not every:
        return
    thin = [torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in matrix]
    shape, others = every[-1][index].shape, [gradients[index] for gradients in every[:-1]]
    size = every[-1][index].abs().mean()
    every[-1][index] = size * (thin[0] @ thin[1].T).view(shape) - sum(others, torch.zeros(shape, dtype=torch.float64))


def without_gradients(setting: Setting, ranks: int, count: int) -> Steps:
    """Return steps in which every gradient is zero, so that only what is unsent is sent."""
    zeros: Gradients = [torch.zeros(shape, dtype=torch.float64) for shape in setting.shapes]
    return [[[zeros] for _ in range(ranks)] for _ in range(count)]


def feed(attempt: Attempt, method, setting: Setting, steps: Steps, probe=probe_feeding) -> Tried:
    """Feed gradients to the compressor on every rank of the group."""
    members = members_of(attempt, setting.in_subgroup)
    attempt.sizes.fed_steps = len(steps)
    per_rank = [([],) for _ in range(attempt.world_size)]
    for position, rank in enumerate(members):
        per_rank[rank] = ([step[position] for step in steps],)
    context = f"{method.said}, {setting}" + (f", {called_alone(attempt)}" if setting.in_subgroup else "")
    found = attempt.run(probe, setting, per_rank=per_rank, context=context)
    return Tried(method, setting, steps, members, {rank: found[rank] for rank in members})


# -- judging


def judge_same_bits(tried: Tried) -> None:
    """Check that all ranks get the same gradients, bit for bit."""
    first = tried.members[0]
    for step in range(len(tried.steps)):
        for rank in tried.members[1:]:
            for index in tried.trained():
                here, there = tried.results(rank, step)[index], tried.results(first, step)[index]
                if here is None or there is None or not torch.equal(here, there):
                    where = f"in step {step + 1}, the gradient of parameter {index}"
                    difference = "None" if here is None or there is None else first_difference(here, there, 0.0)
                    raise Wrong(
                        {rank: f"{tried.context}: {where} differs from that on rank {first}: {difference}"},
                        "The ranks would now train different models. Hint: do all ranks compute the result from "
                        "the same messages, in the same order?",
                    )


def judge_frozen(tried: Tried) -> None:
    for rank in tried.members:
        for index in tried.setting.frozen:
            if tried.results(rank, -1)[index] is not None:
                raise Wrong({rank: f"{tried.context}: parameter {index} is frozen, but its .grad is not None"})


def judge_steps(tried: Tried) -> None:
    """Compare every step with one process that does the same."""
    reference = tried.method.reference(tried.setting)
    assert reference is not None
    tolerance = {torch.float64: 1e-8, torch.float32: 2e-3}.get(tried.setting.dtype, 2**-7)
    for step in range(len(tried.steps)):
        expected = reference.step(tried.shares(step))
        for index in tried.trained():
            scale = max(1e-6, *(each.abs().max().item() for each in expected.values()))
            for rank in tried.members:
                result = _whole_result(tried, rank, step, index)
                if not _close(result, expected[index], tolerance * scale):
                    difference = _difference(result, expected[index], tolerance * scale)
                    context = f"{tried.context}: in step {step + 1}, the gradient of parameter {index} is wrong"
                    raise Wrong({rank: f"{context}: {difference}"}, hints.on_steps(tried, step, rank, index))


def judge_rounding(tried: Tried) -> None:
    """Check that at any time all gradients applied so far equal all mean gradients so far, up to one rounding error."""
    setting, count = tried.setting, len(tried.members)
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in setting.shapes]
    applied = {rank: [torch.zeros(shape, dtype=torch.float64) for shape in setting.shapes] for rank in tried.members}
    largest: dict[int, torch.Tensor] = {}  # by bucket: for each rank and block, the largest element so far
    relative = {torch.float64: 0.0, torch.float32: 1e-6}.get(setting.dtype, 2**-7)
    for step in range(len(tried.steps)):
        shares = tried.shares(step)
        for total, mean in zip(sums, tried.means(step), strict=True):
            total += mean
        for rank in tried.members:
            for index in tried.trained():
                result = _whole_result(tried, rank, step, index)
                applied[rank][index] += result.double()
        for number, bucket in enumerate(setting.buckets()):
            now = torch.stack([_block_maxima(_flat(own, bucket)) for own in shares]).double()
            largest[number] = torch.maximum(largest.get(number, now), now)
            # Each rank's rounding error is at most half a scale, and so is that of the sum.
            most = largest[number].sum(0) / LEVELS * _SLACK
            most = (most.unsqueeze(-1) * torch.ones(BLOCK)).flatten()[: numel_of(setting, bucket)]
            expected = _flat(sums, bucket)
            # In bf16, each result is rounded once more when it is copied into the bucket.
            most = most + relative * (step + 1) * (1e-30 + expected.abs().max() + largest[number].max() * count)
            for rank in tried.members:
                error = (_flat(applied[rank], bucket) - expected).abs()
                if not bool((error <= most).all()):
                    at = int((error / most).nan_to_num(torch.inf).argmax())
                    found, right = _flat(applied[rank], bucket)[at].item(), expected[at].item()
                    what = "the gradient" if step == 0 else f"the sum of the gradients of {step + 1} steps"
                    raise Wrong(
                        {
                            rank: f"{tried.context}: element {at} of bucket {number}: {what} is {found:.6g}, expected "
                            f"{right:.6g} with an error of at most {most[at].item():.2g}"
                        },
                        hints.on_rounding(step, found, right, count),
                    )


def judge_nothing_lost(
    tried: Tried, began: int, tolerance: float | None = None, hint: str = hints.ON_WHAT_IS_SENT
) -> None:
    """Check that after some steps without gradients the sum of what was applied is the sum of all mean gradients.

    Args:
        tried: What was tried. From step `began` on, all gradients are zero.
        began: The index of that step.
        tolerance: How much may be lost, relative to the largest gradients; by default, what rounding explains.
        hint: What to ask if more is lost.
    """
    count, means = len(tried.steps), [tried.means(step) for step in range(len(tried.steps))]
    if tolerance is None:
        tolerance = 1e-5 if tried.method.reference(tried.setting) is None else 1e-9
        if tried.setting.dtype == torch.bfloat16:
            tolerance = 2**-7  # each result is rounded once more when it is copied into the bucket
    for bucket in tried.setting.buckets():
        most = tolerance * sum(max(mean[index].abs().max().item() for index in bucket) for mean in means)
        for rank, index in ((rank, index) for rank in tried.members for index in bucket):
            applied = total_of(_whole_result(tried, rank, step, index).double() for step in range(count))
            total = total_of(mean[index] for mean in means)
            if not _close(applied, total, most):
                after = f"after {counted(began, 'step')}, and {count - began} more in which all gradients were zero"
                what = f"everything applied to parameter {index} should add up to the sum of its mean gradients"
                difference = _difference(applied, total, most)
                raise Wrong(
                    {rank: f"{tried.context}: {after}, {what}: {difference}"},
                    f"Some of it was lost or sent twice. {hint}",
                )


def judge_wire(tried: Tried) -> None:
    """Check what each rank sends, and that backward() launches the first collectives and waits for none."""
    count = len(tried.members)
    buckets = tried.setting.buckets()
    expected = sum(tried.method.sent_bytes(tried.setting, bucket, count) for bucket in buckets)
    for rank in tried.members:
        for number, step in enumerate(tried.found[rank], 1):
            context = f"{tried.context}, step {number}"
            if step.launched_quietly:
                quiet = counted(step.launched_quietly, "collective")
                raise Wrong({rank: f"{context}: launched {quiet} inside no_sync(), expected none"})
            if abs(step.sent_bytes - expected) > 0.5:
                sent = f"sent {step.sent_bytes:,.0f} bytes ({', '.join(step.ops)}; {', '.join(step.dtypes)})"
                raise Wrong(
                    {rank: f"{context}: {sent}, expected {expected:,.0f}"},
                    "Hint: which tensors are sent, of which lengths and dtypes?",
                )
            if count > 1 and step.launched_in_hooks < len(buckets):
                launched = counted(step.launched_in_hooks, "collective")
                raise Wrong(
                    {rank: f"{context}: hooks launched {launched} for {counted(len(buckets), 'bucket')}"},
                    "Hint: what happens before the first yield?",
                )
            if barriers := [op for op in step.ops if "barrier" in op]:
                raise Wrong(
                    {rank: f"{context}: launched a {barriers[0]}, expected none"},
                    "A barrier makes all ranks wait for the slowest one. Hint: which handle should you yield instead?",
                )
            if step.waits_in_hooks:
                raise Wrong(
                    {rank: f"{context}: hooks waited {counted(step.waits_in_hooks, 'time')}, expected 0"},
                    "Hint: launch() must return at once. Which line waits before the first yield?",
                )


def judge_two_models(attempt: Attempt, method: Method, setting: Setting) -> None:
    """Let two models use one compressor in turn. The first one must get what it would get alone."""
    steps, others = (draw_steps(attempt, method, setting, 4) for _ in range(2))
    per_rank = [([step[rank] for step in steps], [step[rank] for step in others]) for rank in range(attempt.world_size)]
    context = f"{method.said} for two models in turn, {setting}"
    found = attempt.run(probe_two_models, setting, per_rank=per_rank, context=context)
    tried = Tried(method, setting, steps, list(range(attempt.world_size)), dict(enumerate(found)))
    try:
        judge_result(tried)
    except Wrong as wrong:
        judge_result(feed(attempt, method, setting, steps))  # raises if it is wrong for one model, too
        hint = "With one model, this is right. Hint: you keep something between steps. Which bucket does it belong to?"
        raise Wrong(f"one compressor for two models in turn: {wrong.evidence}", hint) from None


def judge_equal_buckets(attempt: Attempt, method: Method, shape: tuple[int, int]) -> None:
    """Let several buckets of the same size be in flight together. None may change what another one gets."""
    setting = Setting((shape,) * 3, method.arguments, cap_mb=shape[0] * shape[1] * 8 / MB)
    try:
        judge_result(feed(attempt, method, setting, draw_steps(attempt, method, setting, 2)))
    except Wrong as wrong:
        alone = replace(setting, shapes=(shape,))
        judge_result(feed(attempt, method, alone, draw_steps(attempt, method, alone, 2)))  # raises if it is wrong, too
        hint = "One bucket alone is right. Hint: all buckets are in flight together. Which tensors do they share?"
        raise Wrong(wrong.evidence, hint) from None


def judge_within_group(attempt: Attempt, method: Method, setting: Setting) -> None:
    """Let only the ranks of a subgroup use the compressor."""
    inside = replace(setting, in_subgroup=True)
    tried = feed(attempt, method, inside, draw_steps(attempt, method, inside, 3))
    try:
        judge_same_bits(tried)
        judge_result(tried)
    except Wrong as wrong:
        # This raises if it is wrong among all ranks, too.
        judge_result(feed(attempt, method, setting, draw_steps(attempt, method, setting, 3)))
        hint = "Among all ranks, three such steps are right. Hint: do you use the rank in the group, or the global one?"
        raise Wrong(wrong.evidence, hint) from None


def judge_rounded_once(tried: Tried) -> None:
    """Check the results of one step in bf16 in which everything is sent: sums in float32, which are rounded once."""
    shares = tried.shares(0)
    for index, mean in enumerate(tried.means(0)):
        largest = torch.stack([own[index] for own in shares]).abs().amax(0).double()
        most = 1.001 * (2**-8 * mean.abs() + 1e-6 * largest)  # half of the distance between two bf16 numbers
        for rank in tried.members:
            result = _whole_result(tried, rank, 0, index)
            off = ~((result.double() - mean).abs() <= most).flatten()  # This finds nan, too.
            if off.any():
                at = int(off.nonzero()[0])
                found, right = result.flatten()[at].item(), mean.flatten()[at].item()
                raise Wrong(
                    {rank: f"{tried.context}: element {at} is {found:.6g}, but the sum is {right:.6g} before rounding"},
                    "Hint: in which dtype do you add up, and how often is the sum rounded?",
                )


def judge_waited(tried: Tried) -> None:
    """Check that every operation has been waited for before the result is used."""
    for rank in tried.members:
        for number, step in enumerate(tried.found[rank], 1):
            if operations := step.not_waited_for:
                raise Wrong(
                    {rank: f"{tried.context}: in step {number}, nothing waits for {', '.join(operations)}"},
                    "Its result may not be complete when you use it. Hint: which handles have you yielded?",
                )


def judge_result(tried: Tried) -> None:
    """Judge the values of every step, as exactly as the method allows."""
    judge_waited(tried)
    judge_rounding(tried) if tried.method.reference(tried.setting) is None else judge_steps(tried)


def _whole_result(tried: Tried, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the gradient that a rank got for a parameter, if there is one and it has the right dtype."""
    setting, result = tried.setting, tried.results(rank, step)[index]
    if result is None:
        raise Wrong({rank: f"{tried.context}: after step {step + 1}, the gradient of parameter {index} is None"})
    if result.dtype != setting.dtype:
        raise Wrong(
            {rank: f"{tried.context}: the gradient of parameter {index} is {result.dtype}, expected {setting.dtype}"}
        )
    return result


def _flat(tensors: Sequence[torch.Tensor], bucket: list[int]) -> torch.Tensor:
    return torch.cat([tensors[index].flatten() for index in bucket])


def _block_maxima(flat: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK))
    return padded.view(-1, BLOCK).abs().amax(-1)


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return found.shape == expected.shape and bool(((found.double() - expected.double()).abs() <= tolerance).all())


def _difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if found.shape != expected.shape:
        return f"the shape is {list(found.shape)}, expected {list(expected.shape)}"
    off = ~((found.double() - expected.double()).abs() <= tolerance).flatten()
    at = int(off.nonzero()[0])
    return f"element {at} is {found.flatten()[at].item():.6g}, expected {expected.flatten()[at].item():.6g}"
