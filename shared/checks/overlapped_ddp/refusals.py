"""Judging what a wrapper must reject: a second gradient for a bucket in flight, and gradients that have a graph."""

from shared.checks.engine.compare import by_rank, judge_gradients
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.overlap_probes import Micro, probe_refusals
from shared.checks.engine.overlap_steps import draw_shares, mean_of
from shared.checks.models.overlap import draw_sizes

SECOND = "a second backward() before finish_gradient_sync()"
_LOOK_AT_FLIGHT = "Look at: the bucket is in flight. What happens when another gradient is added to it?"
_SAY_WHAT_TO_DO = "Say what to do instead: the reader of this error knows neither hooks nor buckets."
_LOOK_AT_GRAPH = "Look at: could a collective be a part of the gradient's graph?"


def wrong_backwards_are_rejected(attempt: Attempt) -> None:
    _judge(attempt, SECOND, again=True)
    _judge(attempt, "backward(create_graph=True)")


def a_second_backward_inside_is_rejected(attempt: Attempt) -> None:
    _judge(attempt, f"{SECOND}, inside no_sync()", again=True, silent=True)


def _judge(attempt: Attempt, what: str, again: bool = False, silent: bool = False) -> None:
    """Do what is to be rejected, and after a second backward() a good step. silent: the second one inside no_sync()"""
    sizes, seed, shares = draw_sizes(attempt), attempt.draw_seed(), draw_shares(attempt)
    found = attempt.run(probe_refusals, sizes, again, silent, seed, per_rank=shares)
    for rank, result in enumerate(found):
        if result["kind"] is None:
            hint = _LOOK_AT_FLIGHT if again else _LOOK_AT_GRAPH
            raise Wrong({rank: f"{what} is accepted; expected a RuntimeError"}, hint)
        if result["kind"] != "RuntimeError" or not result["message"].strip():
            said = f"{result['kind']}({result['message'][:80]!r})"
            raise Wrong({rank: f"{what} raises {said}; expected a RuntimeError that says why"})
        if again and not any(name in result["message"] for name in ("finish_gradient_sync", "no_sync")):
            said = f"{what} is rejected with {result['message'][:80]!r}"
            raise Wrong(
                {rank: said}, "Say what to do instead: the reader of this error knows neither hooks nor buckets."
            )
    if again:
        want, local = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
        context = f"{what}; then finish_gradient_sync(), zero_grad() and a step as it should be"
        judge_gradients(by_rank(found, "gradients"), want, local, context)
