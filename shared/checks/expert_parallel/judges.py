"""Compare a layer with sharded experts with what one process computes, and recognize common mistakes."""

import re

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.expert_parallel.exchanging import groups_of
from shared.checks.expert_parallel.layers import (
    Draw,
    Expected,
    Layer,
    Trained,
    Work,
    measured_bytes,
    one_process,
    probe_layer,
    probe_memory,
    probe_rejection,
    sent_bytes,
)

_MOST_SLACK = 1.02
_PRECISE_IN_FLOAT32 = 1e-5


def judge_layer(attempt: Attempt, layer: Layer, in_groups: bool = False, wire_only: bool = False) -> None:
    """Compare outputs and gradients, or only the bytes, of one step with those of one process."""
    groups = groups_of(attempt, in_groups)
    draws = [Draw.of(attempt, layer, len(members)) for members in groups]
    own = {
        rank: (draw.seed, draw.batches[index])
        for members, draw in zip(groups, draws, strict=True)
        for index, rank in enumerate(members)
    }
    per_rank = [own[rank] for rank in range(attempt.world_size)]
    results = attempt.run(probe_layer, layer, groups, per_rank=per_rank, context=str(layer))
    for members, draw in zip(groups, draws, strict=True):
        found, expected = [results[rank] for rank in members], one_process(layer, draw)
        if wire_only:
            _judge_bytes(members, layer, found, expected)
        else:
            _judge_values(members, layer, found, expected)


def _judge_values(members: list[int], layer: Layer, found: list[Trained], expected: list[Expected]) -> None:
    for index, (rank, its) in enumerate(zip(members, found, strict=True)):
        _judge_names(rank, layer, its, index)
    for rank, its, right in zip(members, found, expected, strict=True):
        for call, (output, expected_output) in enumerate(zip(its.outputs, right.outputs, strict=True)):
            if not nearly_equal(output, expected_output):
                hint = _cause_of_output(output, expected_output) or _cause_of_tokens(output, right.work[call])
                raise Wrong({rank: f"{layer}, the output: {first_difference(output, expected_output)}"}, hint)
        for loss, expected_loss in zip(its.balancing, right.balancing, strict=True):
            if not nearly_equal(loss, expected_loss):
                message = f"{layer}, aux_loss: {first_difference(loss, expected_loss)}"
                raise Wrong(
                    {rank: message}, "Hint: it is the balancing loss of this rank's tokens. Does exercise 16.1 pass?"
                )
    for index, (rank, its) in enumerate(zip(members, found, strict=True)):
        _judge_experts(rank, layer, its, index, expected)
    for rank, its, right in zip(members, found, expected, strict=True):
        _judge_router(rank, layer, its, right, expected)
        for gradient, expected_gradient in zip(its.input_gradients, right.input_gradients, strict=True):
            if gradient is None or not nearly_equal(gradient, expected_gradient):
                difference = "it is None" if gradient is None else first_difference(gradient, expected_gradient)
                hint = "Hint: which rows has this token sent, and do the gradients of all of them come back to it?"
                raise Wrong({rank: f"{layer}, the gradient of the tokens: {difference}"}, hint)


def _judge_names(rank: int, layer: Layer, its: Trained, index: int) -> None:
    names = {name for name in its.gradients if name.startswith("experts")}
    if names != layer.own_names(index):
        message = f"{layer}, the experts' parameters are {sorted(names)}, expected {sorted(layer.own_names(index))}"
        raise Wrong(
            {rank: message},
            "Hint: which block of the experts does this rank get, and what are the keys of its ModuleDict?",
        )


def _cause_of_output(output: torch.Tensor, expected: torch.Tensor) -> str | None:
    if output.shape != expected.shape:
        return "Hint: how many rows come back, and how many were sent?"
    if not output.isfinite().all():
        return "It is not finite. Hint: which rows of a tensor does nobody fill?"
    if nearly_equal(output, expected, _PRECISE_IN_FLOAT32):
        return "It is close, but not as precise as float64. Hint: is anything computed or sent in float32?"
    return None


def _cause_of_tokens(output: torch.Tensor, work: Work) -> str:
    """Say whether the wrong tokens have results of other experts, or of other tokens of this rank."""
    causes = set()
    for token, found in enumerate(output.flatten(0, -2)):
        weights = work.weights[token]
        experts = weights.nonzero().flatten()
        if nearly_equal(found, weights @ work.results[token]):
            continue
        if _is_a_sum(found, [weights[expert] * work.results[token] for expert in experts]):
            causes.add("experts")
        elif _is_a_sum(found, [weights[expert] * work.results[:, expert] for expert in experts]):
            causes.add("tokens")
        else:
            causes.add("neither")
    if causes == {"experts"}:
        return "Each wrong token has gone through other experts than its own. Hint: which block does each expert take?"
    if causes == {"tokens"}:
        return "The experts are right, but tokens have each other's results. Hint: in which order must rows return?"
    return "Hint: in which order do rows arrive, which order do the experts need, and which order must they return in?"


def _is_a_sum(found: torch.Tensor, choices: list[torch.Tensor]) -> bool:
    """Tell whether one row of each of the choices (rows, D) add up to what was found (D)."""
    sums = found.new_zeros(1, len(found))
    for rows in choices:
        sums = (sums.unsqueeze(1) + rows).flatten(0, 1)
    return nearly_equal(found, sums[(sums - found).abs().sum(-1).argmin()])


def _judge_experts(rank: int, layer: Layer, its: Trained, index: int, expected: list[Expected]) -> None:
    size = len(expected)
    for name in sorted(layer.own_names(index)):
        gradient = its.gradients[name]
        whole = total_of(each.expert_gradients[name] for each in expected)
        found = torch.zeros_like(whole) if gradient is None else gradient
        if nearly_equal(found, whole):
            continue
        hints = {
            f"It is exactly {size} times too large. Hint: which line adds up gradients that are complete already?": (
                size > 1 and nearly_equal(found, size * whole)
            ),
            f"It is exactly {size} times too small. Hint: is it that of the sum or of the mean of the losses?": (
                size > 1 and nearly_equal(size * found, whole)
            ),
            "It is that of this rank's loss alone. Hint: which rows of other ranks has this expert computed?": (
                nearly_equal(found, expected[index].expert_gradients[name])
            ),
            "It is all zeros. Hint: does a graph lead from every rank's loss to this expert?": not found.any(),
        }
        otherwise = "Hint: which rows has this expert computed, and do all of their gradients come back?"
        hint = next((hint for hint, applies in hints.items() if applies), otherwise)
        raise Wrong({rank: f"{layer}, the gradient of {name}: {first_difference(found, whole)}"}, hint)


def _judge_router(rank: int, layer: Layer, its: Trained, right: Expected, expected: list[Expected]) -> None:
    gradient = its.gradients.get("router.weight")
    found = torch.zeros_like(right.router_gradient) if gradient is None else gradient
    if nearly_equal(found, right.router_gradient):
        return
    hint = "The experts' gradients are right. Hint: through which tensors does the loss reach the router?"
    if len(expected) > 1 and nearly_equal(found, total_of(each.router_gradient for each in expected)):
        hint = "It is that of all ranks' losses. Hint: whose loss does the router's gradient belong to here?"
    raise Wrong({rank: f"{layer}, the router's gradient: {first_difference(found, right.router_gradient)}"}, hint)


def _judge_bytes(members: list[int], layer: Layer, found: list[Trained], expected: list[Expected]) -> None:
    size = len(members)
    most_for_counts = layer.calls * 8 * layer.experts_per_rank * size * size  # if every rank got all counts
    for index, (rank, its) in enumerate(zip(members, found, strict=True)):
        rows_bytes = sent_bytes(layer, expected, index)
        for phase, calls, allowed in (("forward", its.forward, most_for_counts), ("backward", its.backward, 0)):
            sent = measured_bytes(calls, rank)
            message = f"{layer}, in {phase}, this rank sends {sent:,.0f} bytes ({describe_calls(calls)})"
            if sent > rows_bytes + allowed + 1:
                counts = f" and at most {allowed:,} for counts" if allowed else ""
                hint = "Hint: which rows does only one rank need, and which counts are known already?"
                raise Wrong({rank: f"{message}; expected {rows_bytes:,}{counts}"}, hint)
            if sent < rows_bytes - 1:
                hint = "Hint: which rows have an expert on another rank, and in which dtype are they sent?"
                raise Wrong({rank: f"{message}; expected at least {rows_bytes:,}"}, hint)


# -- the checks of exercise 16.4


a_plain_layer = on_each(judge_layer, Layer())
layers_of_several_sizes = on_each(
    judge_layer,
    Layer(((3,), (8,), (5,)), experts_per_rank=1, top_k=1, balancing=0.7),
    Layer(((2, 3), (1, 5)), experts_per_rank=3, top_k=3, balancing=0.7),
    Layer(((7,), (4,)), calls=3),
)


def ranks_and_experts_without_tokens(attempt: Attempt) -> None:
    idle = attempt.random.randrange(attempt.world_size)
    some = tuple((0,) if index == idle else (5,) for index in range(attempt.world_size))
    judge_layer(attempt, Layer(some, balancing=0.7))
    judge_layer(attempt, Layer(((5,),), experts_per_rank=2, top_k=1, favorite=2 * idle + 1))
    judge_layer(attempt, Layer(some, experts_per_rank=1, top_k=1, favorite=idle))
    judge_layer(attempt, Layer(((0,),)))


layers_with_a_capacity = on_each(
    judge_layer,
    Layer(((9,), (6,)), capacity_factor=0.6, balancing=0.7),
    Layer(((8,), (0,)), experts_per_rank=1, top_k=1, capacity_factor=0.5, favorite=0),
    Layer(((9,),), capacity_factor=1.25),
)


def rows_are_sent_once(attempt: Attempt) -> None:
    judge_layer(attempt, Layer(((20,), (11,)), dim=12), wire_only=True)
    judge_layer(attempt, Layer(((9,),), dim=12, experts_per_rank=1, top_k=1, favorite=0), wire_only=True)


def layers_in_groups(attempt: Attempt) -> None:
    judge_layer(attempt, Layer(((6,), (3,)), balancing=0.7), in_groups=True)
    judge_layer(attempt, Layer(((6,), (3,)), dim=12), in_groups=True, wire_only=True)


def each_rank_holds_its_experts(attempt: Attempt) -> None:
    layer, size = Layer(((2,),), experts_per_rank=12 // attempt.world_size, dim=32, hidden=64), attempt.world_size
    draw = Draw.of(attempt, layer, size)
    own_bytes = 8 * (2 * 32 * 64 * layer.experts_per_rank + 32 * 12)
    per_rank = [(draw.seed, int(_MOST_SLACK * own_bytes), draw.batches[rank]) for rank in range(size)]
    for rank, held in enumerate(attempt.run(probe_memory, layer, per_rank=per_rank)):
        for (moment, nbytes), copies in zip(held.items(), (1, 2), strict=True):
            if nbytes > _MOST_SLACK * copies * own_bytes:
                message = f"{moment}, this rank holds {nbytes:,} bytes; expected {copies * own_bytes:,}"
                raise Wrong({rank: message}, "Hint: does this rank still refer to the experts of the others?")


def layers_that_do_not_divide(attempt: Attempt) -> None:
    size = attempt.world_size
    experts = size * attempt.random.randint(1, 4) + attempt.random.randint(1, size - 1)
    context = f"{experts} experts on {size} ranks"
    for rank, message in enumerate(attempt.run(probe_rejection, experts, False, context=context)):
        numbers = {int(number) for number in re.findall(r"\d+", message)}
        if not message.startswith("ValueError: ") or not {experts, size} <= numbers:
            raised = f"your code raised {message}" if message else "your code raised no error"
            evidence = f"{context}: {raised}; expected a ValueError that names both numbers"
            raise Wrong({rank: evidence}, "Hint: does the given beginning of from_moe still run first?")
    context = "a different layer on every rank"
    for rank, message in enumerate(attempt.run(probe_rejection, size, True, context=context)):
        if not message.startswith("ValueError: "):
            raised = f"your code raised {message}" if message else "your code raised no error"
            evidence = f"{context}: {raised}; expected a ValueError"
            raise Wrong({rank: evidence}, "Hint: does the given beginning of from_moe still run first?")
