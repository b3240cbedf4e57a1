"""Judge how tokens are routed and sorted. Each rank has logits and choices of its own; nothing is sent."""

from dataclasses import dataclass

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.expert_parallel.layers import routed, uninitialized_is_nan


@dataclass
class Route:
    chosen: torch.Tensor
    weights: torch.Tensor
    balancing: torch.Tensor
    gradients: list[torch.Tensor | None]  # of the weights and of the balancing loss, each by itself


def probe_route(route, logits: torch.Tensor, top_k: int, slope: torch.Tensor) -> Route:
    logits = logits.to(device_here()).requires_grad_()
    with uninitialized_is_nan():
        chosen, weights, balancing = route(logits, top_k)
        gradients = [
            torch.autograd.grad(value, logits, retain_graph=True, allow_unused=True)[0] if value.requires_grad else None
            for value in ((weights * slope.to(device_here())).sum(), balancing)
        ]
    return Route(chosen, weights.detach(), balancing.detach(), gradients)


def judge_routes(
    attempt: Attempt, tokens: int, experts: int, top_k: int, what: str = "all", skewed: bool = False
) -> None:
    """Compare the routes of one batch per rank.

    Args:
        tokens: T.
        experts: E.
        top_k: k.
        what: "weights" or "balancing" judges only these; "all" judges everything.
        skewed: Whether most tokens choose the same experts.
    """
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    context = f"{tokens} tokens, {experts} experts, top_k={top_k}"
    drawn = []
    for _ in range(attempt.world_size):
        logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
        logits[:, 0] += 2.0 * skewed
        drawn.append((logits, top_k, torch.randn(tokens, top_k, generator=generator, dtype=torch.float64)))
    for rank, found in enumerate(attempt.run(probe_route, per_rank=drawn, context=context)):
        if what != "balancing":
            logits, _, slope = drawn[rank]
            _judge_weights(rank, found, logits, top_k, slope, context)
        if what != "weights":
            _judge_balancing(rank, found, drawn[rank][0], top_k, context)


def _judge_weights(rank: int, found: Route, logits, top_k: int, slope, context: str) -> None:
    leaf = logits.clone().requires_grad_()
    whole, _, _ = routed(leaf, top_k)
    expected_chosen = logits.argsort(-1, descending=True)[:, :top_k]
    expected = whole.gather(1, expected_chosen)
    chosen = found.chosen
    if chosen.shape != expected_chosen.shape or not torch.equal(
        chosen.sort(-1).values, expected_chosen.sort(-1).values
    ):
        message = f"{context}: chosen is {chosen.tolist()[:3]} …, expected {expected_chosen.tolist()[:3]} …"
        raise Wrong({rank: message}, "Hint: along which dimension are the k largest chosen?")
    if not torch.equal(chosen, expected_chosen):
        message = f"{context}: chosen is {chosen.tolist()[:3]} …, expected {expected_chosen.tolist()[:3]} …"
        raise Wrong({rank: message}, "These are the right experts. Hint: which of them comes first?")
    if not nearly_equal(found.weights, expected):
        hint = "Hint: over which experts do the weights add up to 1?"
        probabilities = logits.softmax(-1)
        if found.weights.shape == expected.shape and nearly_equal(found.weights, probabilities.gather(1, chosen)):
            hint = "These are the probabilities. Hint: what is their sum, if k is smaller than E?"
        raise Wrong({rank: f"{context}, the weights: {first_difference(found.weights, expected)}"}, hint)
    (gradient,) = torch.autograd.grad((expected * slope).sum(), leaf)
    _judge_gradient(rank, found.gradients[0], gradient, f"{context}, the gradient of the weights")


def _judge_gradient(rank: int, found, expected: torch.Tensor, context: str) -> None:
    if found is None:
        if expected.numel() and expected.abs().max() > 1e-12:
            raise Wrong({rank: f"{context} is None"}, "Hint: does autograd know how this result depends on the logits?")
    elif not nearly_equal(found, expected):
        hint = "Hint: which of the tensors on the way from the logits are constants for autograd?"
        raise Wrong({rank: f"{context}: {first_difference(found, expected)}"}, hint)


def _judge_balancing(rank: int, found: Route, logits, top_k: int, context: str) -> None:
    leaf = logits.clone().requires_grad_()
    _, _, expected = routed(leaf, top_k)
    loss, expected_loss = found.balancing, expected.detach()
    if loss.shape != () or not nearly_equal(loss, expected_loss):
        hints = {
            "It is not finite. Hint: what do you divide by if there are no tokens?": not loss.isfinite().all(),
            "It is exactly E times too small. Hint: what is the loss if everything is balanced?": (
                loss.shape == () and nearly_equal(loss * logits.shape[1], expected_loss)
            ),
            "It is exactly k times too large. Hint: of how many assignments is a share?": (
                top_k > 1 and loss.shape == () and nearly_equal(loss, top_k * expected_loss)
            ),
            "It is close, but not as precise as float64. Hint: what is the dtype of the shares?": (
                loss.shape == () and nearly_equal(loss, expected_loss, 1e-5)
            ),
        }
        hint = next((hint for hint, applies in hints.items() if applies), "Hint: what are f_e and P_e for one expert?")
        raise Wrong({rank: f"{context}, the balancing loss: {first_difference(loss, expected_loss)}"}, hint)
    (gradient,) = torch.autograd.grad(expected, leaf)
    _judge_gradient(rank, found.gradients[1], gradient, f"{context}, the gradient of the balancing loss")


# -- sorting


@dataclass
class Order:
    order: torch.Tensor
    counts: torch.Tensor


def probe_sort(sort_by_expert, chosen: torch.Tensor, experts: int, capacity: int | None) -> Order:
    chosen = chosen.to(device_here())
    before = chosen.clone()
    with uninitialized_is_nan():
        order, counts = (
            sort_by_expert(chosen, experts) if capacity is None else sort_by_expert(chosen, experts, capacity)
        )
    if not torch.equal(before, chosen):
        raise AssertionError("sort_by_expert has overwritten `chosen`")
    return Order(torch.as_tensor(order), torch.as_tensor(counts))


def draw_choices(attempt: Attempt, tokens: int, experts: int, top_k: int, avoids: tuple[int, ...] = ()) -> torch.Tensor:
    """Draw k different experts for each token, none of which is avoided."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, list(avoids)] = -1.0
    return scores.topk(top_k).indices


def judge_sorts(
    attempt: Attempt, tokens: int, experts: int, top_k: int, capacity: int | None = None, avoids: tuple[int, ...] = ()
) -> None:
    """Compare the order of one batch per rank with that of a loop over the experts."""
    drawn = [(draw_choices(attempt, tokens, experts, top_k, avoids),) for _ in range(attempt.world_size)]
    context = f"{tokens} tokens, {experts} experts, top_k={top_k}" + (f", capacity={capacity}" if capacity else "")
    per_rank = [(chosen, experts, capacity) for (chosen,) in drawn]
    for rank, found in enumerate(attempt.run(probe_sort, per_rank=per_rank, context=context)):
        (chosen,) = drawn[rank]
        blocks = [[a for a, e in enumerate(chosen.flatten().tolist()) if e == expert] for expert in range(experts)]
        kept = [block[:capacity] for block in blocks]
        order, counts = [a for block in kept for a in block], [len(block) for block in kept]
        if found.counts.tolist() != counts:
            message = f"{context}, chosen={chosen.tolist()[:4]} …: counts is {found.counts.tolist()}, expected {counts}"
            hint = "Hint: has every expert an entry, also one that nobody chose?"
            if capacity is not None and found.counts.tolist() == [len(block) for block in blocks]:
                hint = "Hint: how many assignments does an expert keep at most?"
            raise Wrong({rank: message}, hint)
        if found.order.tolist() != order:
            message = f"{context}, chosen={chosen.tolist()[:4]} …: order is {found.order.tolist()}, expected {order}"
            hint = "Hint: what does each entry of order number, and in which order are the entries of one expert?"
            if sorted(found.order.tolist()) == sorted(order):
                hint = "These are the right assignments. Hint: in which order are those of the same expert?"
            raise Wrong({rank: message}, hint)
        for name, tensor in (("order", found.order), ("counts", found.counts)):
            if tensor.dtype != torch.int64:
                raise Wrong({rank: f"{context}: the dtype of {name} is {tensor.dtype}, expected torch.int64"})


def a_plain_order(attempt: Attempt) -> None:
    judge_sorts(attempt, 12, 4, 2)
    judge_sorts(attempt, 40, 4, 1)


def experts_without_tokens(attempt: Attempt) -> None:
    judge_sorts(attempt, attempt.random.randint(3, 9), 6, 2, avoids=(0, 3, 5))
    judge_sorts(attempt, attempt.random.randint(3, 9), 6, 3, avoids=(5,))
    judge_sorts(attempt, 0, 4, 2)
    judge_sorts(attempt, 200, 3, 3)


def a_capacity_keeps_the_first(attempt: Attempt) -> None:
    for capacity in (1, 2, 3, 50):
        judge_sorts(attempt, attempt.random.randint(7, 12), 5, 2, capacity, avoids=(attempt.random.randrange(5),))
    judge_sorts(attempt, 0, 5, 2, 3)


def a_plain_route(attempt: Attempt) -> None:
    judge_routes(attempt, 8, 4, 2, "weights")


def other_sizes(attempt: Attempt) -> None:
    for experts, top_k in ((1, 1), (5, 1), (5, 5), (8, 3)):
        judge_routes(attempt, attempt.random.randint(3, 9), experts, top_k, "weights")


def the_balancing_loss(attempt: Attempt) -> None:
    for experts, top_k in ((4, 1), (6, 2), (3, 3)):
        judge_routes(attempt, attempt.random.randint(5, 12), experts, top_k, "balancing")
        judge_routes(attempt, attempt.random.randint(5, 12), experts, top_k, "balancing", skewed=True)


def no_tokens(attempt: Attempt) -> None:
    judge_routes(attempt, 0, 4, 2)
