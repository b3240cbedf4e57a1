"""Judge what is done with the gradients of experts, which are sharded, and of the other parameters, which are not."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shared import wire
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel.probe import join_one_of
from shared.checks.engine.subgroups import staying_inside
from shared.checks.expert_parallel.exchanging import groups_of
from shared.checks.expert_parallel.layers import uninitialized_is_nan
from shared.wire import instrumentation

_SHAPES = {"experts": ((3, 4), (4, 3), (5,)), "others": ((6, 2), (4,), (2, 5))}
_TOLERANCE = 1e-6  # torch adds 1e-6 to a norm before it divides by it, which need not be imitated
_BF16_TOLERANCE = 1e-6  # a square that is rounded to bf16 may be wrong by 2e-3
Gradients = dict[str, list[torch.Tensor | None]]  # by kind, as in _SHAPES


def draw_gradients(attempt: Attempt, missing: tuple[str, ...] = ()) -> Gradients:
    """Draw the gradients of one rank. The last one of each kind in `missing` is None."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    drawn: Gradients = {
        kind: [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for kind, shapes in _SHAPES.items()
    }
    for kind in missing:
        drawn[kind][-1] = None
    return drawn


@dataclass
class Changed:
    gradients: Gradients
    calls: list[instrumentation.Call]
    norm: torch.Tensor | None = None


def probe_gradients(
    piece, groups: list[list[int]], gradients: Gradients, dtype: torch.dtype, max_norm: float | None
) -> Changed:
    """Let the piece average gradients, or clip them if there is a max_norm."""
    group, members = join_one_of(groups)
    parameters = {
        kind: [_parameter(each, shape, dtype) for each, shape in zip(own, _SHAPES[kind], strict=True)]
        for kind, own in gradients.items()
    }
    arguments = (parameters["experts"], parameters["others"], *(() if max_norm is None else (max_norm,)), group)
    with staying_inside(members if len(groups) > 1 else None), uninitialized_is_nan():
        with instrumentation.listening() as calls:
            returned = piece(*arguments)
    changed = {kind: [p.grad for p in own] for kind, own in parameters.items()}
    return Changed(changed, calls, None if max_norm is None else torch.as_tensor(returned))


def _parameter(gradient: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device_here()))
    if gradient is not None:
        # As autograd may leave it: not contiguous if it has two dimensions.
        parameter.grad = gradient.to(parameter).T.contiguous().T if len(shape) > 1 else gradient.to(parameter)
    return parameter


# -- 16.5


def judge_means(attempt: Attempt, missing: tuple[str, ...] = (), in_groups: bool = False) -> None:
    groups = groups_of(attempt, in_groups)
    drawn = [draw_gradients(attempt, missing) for _ in range(attempt.world_size)]
    context = f"with a .grad that is None in {' and '.join(missing)}" if missing else ""
    per_rank = [(own, torch.float64, None) for own in drawn]
    results = attempt.run(probe_gradients, groups, per_rank=per_rank, context=context)
    for members in groups:
        size = len(members)
        for rank in members:
            found = results[rank].gradients
            for index, gradient in enumerate(found["experts"]):
                own = drawn[rank]["experts"][index]
                _judge_mean(rank, gradient, own, None if own is None else own / size, size, f"experts[{index}]")
            for index, gradient in enumerate(found["others"]):
                own, every = drawn[rank]["others"][index], [drawn[each]["others"][index] for each in members]
                expected = None if own is None else total_of(each for each in every if each is not None) / size
                _judge_mean(rank, gradient, own, expected, size, f"others[{index}]")
        _judge_mean_bytes(members, results, drawn)


def probe_copies(piece, replica_groups: list[list[int]], gradients: Gradients) -> Changed:
    """Let the piece average gradients of experts that have copies."""
    replicas, _ = join_one_of(replica_groups)
    parameters = {
        kind: [_parameter(each, shape, torch.float64) for each, shape in zip(own, _SHAPES[kind], strict=True)]
        for kind, own in gradients.items()
    }
    replicas = dist.group.WORLD if replicas is None else replicas
    with uninitialized_is_nan(), instrumentation.listening() as calls:
        piece(parameters["experts"], parameters["others"], None, replicas)
    return Changed({kind: [p.grad for p in own] for kind, own in parameters.items()}, calls)


def means_of_copies(attempt: Attempt) -> None:
    """Two copies of each expert: dp is the number of ranks, and ep is half of it."""
    size = attempt.world_size
    groups = [[rank, rank + size // 2] for rank in range(size // 2)]
    drawn = [draw_gradients(attempt) for _ in range(size)]
    context = f"dp = {size}, ep = {size // 2}, two copies of each expert"
    results = attempt.run(probe_copies, groups, per_rank=[(own,) for own in drawn], context=context)
    for members in groups:
        for rank in members:
            for index, gradient in enumerate(results[rank].gradients["experts"]):
                every = [drawn[each]["experts"][index] for each in members]
                expected = total_of(each for each in every if each is not None) / size
                _judge_copy(rank, gradient, drawn[rank]["experts"][index], expected, size, context, index)
    _judge_copied_bytes(results, drawn, size)


def _judge_copy(rank: int, found, own, expected, size: int, context: str, index: int) -> None:
    if found is not None and nearly_equal(found, expected):
        return
    hint = "Hint: of how many losses is a copy's gradient the sum, before and after you add them up?"
    if found is not None and nearly_equal(found, own / size):
        hint = "It comes from one copy only. Hint: which tokens reached the other copy of this expert?"
    elif found is not None and nearly_equal(found, size / 2 * expected):
        hint = "It is divided by the number of copies. Hint: how many losses does the mean have?"
    elif found is not None and nearly_equal(2 * found, expected):
        hint = "It is divided twice. Hint: how many losses does the mean have?"
    what = "None" if found is None else first_difference(found, expected)
    raise Wrong({rank: f"{context}, the gradient of experts[{index}]: {what}"}, hint)


def _judge_copied_bytes(results: list[Changed], drawn: list[dict], size: int) -> None:
    for rank, found in enumerate(results):
        of_experts, of_others = (sum(each.nbytes for each in drawn[rank][kind]) for kind in ("experts", "others"))
        expected = of_experts + 2 * (size - 1) / size * of_others  # two copies: 2 · (1/2) · bytes
        sent = sum(wire.sent_bytes_of(call, rank) for call in found.calls)
        if sent > expected + 1:
            message = f"this rank sends {sent:,.0f} bytes ({describe_calls(found.calls)}); expected {expected:,.0f}"
            raise Wrong({rank: message}, "Hint: which ranks need the same gradient of an expert?")


def _judge_mean(rank: int, found, own, expected, size: int, name: str) -> None:
    if expected is None or found is None:
        if expected is not found:
            was, now = ("None" if each is None else "a tensor" for each in (own, found))
            message = f"the gradient of {name} was {was}, and now it is {now}"
            raise Wrong({rank: message}, "Hint: what do you store in the .grad of a parameter that no loss has used?")
    elif not nearly_equal(found, expected):
        hints = {
            f"It is exactly {size} times too large. Hint: of how many losses is it the sum?": (
                size > 1 and nearly_equal(found, size * expected)
            ),
            f"It is exactly {size} times too small. Hint: how many times is it divided?": (
                size > 1 and nearly_equal(size * found, expected)
            ),
            "It is still this rank's own. Hint: where is the result of the all-reduce stored?": nearly_equal(
                found, own
            ),
            "It is the mean over other experts' gradients. Hint: which ranks have a replica of this expert?": (
                name.startswith("experts")
            ),
        }
        hint = next(
            (hint for hint, applies in hints.items() if applies), "Hint: what is in .grad before, and what after?"
        )
        raise Wrong({rank: f"the gradient of {name}: {first_difference(found, expected)}"}, hint)


def _judge_mean_bytes(members: list[int], results: list[Changed], drawn: list[dict]) -> None:
    size = len(members)
    for rank in members:
        nbytes = sum(gradient.nbytes for gradient in drawn[rank]["others"] if gradient is not None)
        expected, calls = 2 * (size - 1) / size * nbytes, results[rank].calls
        sent = sum(wire.sent_bytes_of(call, rank) for call in calls)
        if sent > expected + 1:
            message = f"this rank sends {sent:,.0f} bytes ({describe_calls(calls)}); expected {expected:,.0f}"
            raise Wrong({rank: message}, "Hint: which gradients does this rank have in full already?")


def plain_means(attempt: Attempt) -> None:
    judge_means(attempt)


def means_of_what_there_is(attempt: Attempt) -> None:
    judge_means(attempt)
    judge_means(attempt, ("experts",))
    judge_means(attempt, ("experts", "others"))


def means_in_groups(attempt: Attempt) -> None:
    judge_means(attempt, in_groups=True)


# -- 16.6


def judge_norms(
    attempt: Attempt,
    max_norm: float,
    missing: tuple[str, ...] = (),
    in_groups: bool = False,
    dtype: torch.dtype = torch.float64,
) -> None:
    groups, size = groups_of(attempt, in_groups), attempt.world_size
    drawn = [draw_gradients(attempt, missing) for _ in range(size)]
    for members in groups:
        for rank in members:
            drawn[rank]["others"] = drawn[members[0]]["others"]  # they are averaged before they are clipped
    drawn = [{kind: [_rounded(each, dtype) for each in own] for kind, own in its.items()} for its in drawn]
    context = f"max_norm={max_norm:g}" + (", gradients in bf16" if dtype == torch.bfloat16 else "")
    per_rank = [(own, dtype, max_norm) for own in drawn]
    results = attempt.run(probe_gradients, groups, per_rank=per_rank, context=context)
    for members in groups:
        sharded = sum(_squares(drawn[rank]["experts"]) for rank in members)
        expected = (sharded + _squares(drawn[members[0]]["others"])) ** 0.5
        norms = {rank: results[rank].norm for rank in members}
        for rank in members:
            _judge_norm(rank, norms, expected, context, _too_many(drawn, members, sharded))
            if dtype == torch.float64:
                _judge_clipped(rank, results[rank], drawn[rank], min(1.0, max_norm / (expected + 1e-6)), context)
            calls = results[rank].calls
            if len(calls) != 1 or calls[0].payload_bytes > 8:
                message = (
                    f"{context}: clip_grad_norm_() sends {describe_calls(calls)}; expected one all_reduce of 8 bytes"
                )
                raise Wrong({rank: message}, "Hint: what can a rank add up before it sends?")


def _rounded(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if gradient is None else gradient.to(dtype).double()


def _squares(gradients: list[torch.Tensor | None]) -> float:
    return sum(each.square().sum().item() for each in gradients if each is not None)


def _too_many(drawn: list[dict], members: list[int], sharded: float) -> float:
    """Return the norm if replicated parameters count once per rank."""
    return (sharded + len(members) * _squares(drawn[members[0]]["others"])) ** 0.5


def _judge_norm(rank: int, norms: dict[int, torch.Tensor], expected: float, context: str, too_many: float) -> None:
    norm = norms[rank].double()
    if norm.numel() == 1 and abs(norm.item() - expected) <= _BF16_TOLERANCE * expected:
        return
    every = [each.flatten()[0].item() for each in norms.values()]
    value, hint = norm.flatten()[0].item(), "Hint: which parameters are missing, or counted more than once?"
    if len(norms) > 1 and abs(value - too_many) <= _BF16_TOLERANCE * too_many:
        hint = "Parameters that every rank has are counted on every rank. Hint: when are their squares added?"
    elif len(norms) > 1 and max(every) - min(every) > _BF16_TOLERANCE * expected:
        hint = "The ranks have different norms. Hint: which squares does a rank not have?"
    raise Wrong({rank: f"{context}: the norm is {value:.8g}, expected {expected:.8g}"}, hint)


def _judge_clipped(rank: int, found: Changed, drawn: Gradients, factor: float, context: str) -> None:
    for kind, gradients in found.gradients.items():
        for index, (gradient, own) in enumerate(zip(gradients, drawn[kind], strict=True)):
            if own is None or gradient is None:
                if own is not gradient:
                    change = "was None and is now a tensor" if own is None else "was a tensor and is now None"
                    raise Wrong({rank: f"{context}: {kind}[{index}].grad {change}; expected no change"})
            elif not nearly_equal(gradient, own * factor, _TOLERANCE):
                message = f"{context}, {kind}[{index}].grad: {first_difference(gradient, own * factor, _TOLERANCE)}"
                raise Wrong(
                    {rank: message}, "The norm is right. Hint: by which factor is each gradient scaled, and when?"
                )


a_plain_norm = on_each(judge_norms, 0.5)


def norms_of_what_there_is(attempt: Attempt) -> None:
    judge_norms(attempt, 0.5, ("experts",))
    judge_norms(attempt, 0.5, ("others",))
    judge_norms(attempt, 1000.0)
    if attempt.world_size > 2:
        judge_norms(attempt, 0.5, in_groups=True)


def a_norm_in_bf16(attempt: Attempt) -> None:
    judge_norms(attempt, 1000.0, dtype=torch.bfloat16)
