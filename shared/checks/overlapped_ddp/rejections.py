"""Judge what a wrapper must reject: a second gradient for a bucket in flight, and gradients that belong to a graph."""

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import by_rank, judge_gradients
from shared.checks.engine.failures import Wrong
from shared.checks.engine.overlap_models import draw_sizes
from shared.checks.engine.overlap_probes import Micro, probe_refusals
from shared.checks.engine.overlap_steps import draw_shares, mean_of

SECOND = "a second backward() before finish_gradient_sync()"
_HINT_ON_FLIGHT = "Hint: .grad is a slice of a bucket in flight. What has a second backward() done to it?"
_SAY_WHAT_TO_DO = "The message should say what to do instead, because its reader may not know about hooks and buckets."
_HINT_ON_GRAPH = "Hint: can autograd differentiate through an all-reduce?"


def wrong_backwards_are_rejected(attempt: Attempt) -> None:
    _judge(attempt, SECOND, again=True)
    _judge(attempt, "backward(create_graph=True)")


def a_second_backward_inside_is_rejected(attempt: Attempt) -> None:
    _judge(attempt, f"{SECOND}, inside no_sync()", again=True, silent=True)


def _judge(attempt: Attempt, what: str, again: bool = False, silent: bool = False) -> None:
    """Do what must be rejected; after a rejected second backward(), also take a normal step.

    Args:
        attempt: The check's attempt.
        what: What is done, in words.
        again: Whether to run a second backward() rather than backward(create_graph=True).
        silent: Whether the second backward() runs inside no_sync().
    """
    sizes, seed, shares = draw_sizes(attempt), attempt.draw_seed(), draw_shares(attempt)
    found = attempt.run(probe_refusals, sizes, again, silent, seed, per_rank=shares)
    for rank, result in enumerate(found):
        if result["kind"] is None:
            hint = _HINT_ON_FLIGHT if again else _HINT_ON_GRAPH
            raise Wrong({rank: f"{what} is accepted; expected a RuntimeError"}, hint)
        if result["kind"] != "RuntimeError" or not result["message"].strip():
            evidence = f"{result['kind']}({result['message'][:80]!r})"
            raise Wrong({rank: f"{what} raises {evidence}; expected a RuntimeError that says why"})
        if again and not any(name in result["message"] for name in ("finish_gradient_sync", "no_sync")):
            evidence = f"{what} is rejected with {result['message'][:80]!r}"
            raise Wrong({rank: evidence}, _SAY_WHAT_TO_DO)
    if again:
        expected, local = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
        context = f"{what}; then finish_gradient_sync(), zero_grad() and a normal step"
        judge_gradients(by_rank(found, "gradients"), expected, local, context)
