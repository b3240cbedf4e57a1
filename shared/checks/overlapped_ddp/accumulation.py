"""Judge no_sync(): nothing is sent inside it, and the next synchronization includes what was accumulated there."""

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import judge_messages
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.overlap_models import Sizes, draw_sizes
from shared.checks.engine.overlap_probes import Micro, probe_graph, probe_leaving
from shared.checks.engine.overlap_steps import draw_shares, judge_steps
from shared.checks.engine.rejections import judge_errors
from shared.checks.engine.training import Draw
from shared.checks.models import awkward

# -- judge what a wrapper must reject: gradients that belong to a graph


def a_graph_is_rejected(attempt: Attempt) -> None:
    errors = attempt.run(probe_graph, draw_sizes(attempt), attempt.draw_seed(), per_rank=draw_shares(attempt))
    hint = "Hint: can autograd differentiate through an all-reduce?"
    judge_errors(errors, "backward(create_graph=True)", hint=hint)


_HINT_ON_PENDING = "Hint: are these gradients averaged yet? Which method averages them?"


def probe_pending(wrapper, seed: int, x, y) -> bool | None:
    """Run a backward inside no_sync().

    Returns:
        Whether the wrapper says afterwards that there are gradients left to average; None if it does not say.
    """
    module = awkward.build("Plain", seed).to(device_here())
    wrapped = wrapper(module)
    with wrapped.no_sync():
        awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward()
    return getattr(getattr(wrapped, "sync", None), "pending", None)


def accumulated_gradients_are_pending(attempt: Attempt) -> None:
    for rank, pending in enumerate(attempt.run(probe_pending, per_rank=Draw(attempt).per_rank)):
        if pending is False:
            evidence = "backward() ran inside no_sync(), and sync.pending is False after the block; expected True"
            raise Wrong({rank: evidence}, _HINT_ON_PENDING)


def no_message_inside(attempt: Attempt) -> None:
    _judge_leaving(attempt, about_exceptions=False)


def an_exception_leaves_it_as_it_was(attempt: Attempt) -> None:
    _judge_leaving(attempt, about_exceptions=True)


def _judge_leaving(attempt: Attempt, about_exceptions: bool) -> None:
    sizes = draw_sizes(attempt)
    context, shares = "with some steps inside no_sync() and some outside", draw_shares(attempt)
    found = attempt.run(probe_leaving, sizes, attempt.draw_seed(), per_rank=shares, context=context)
    for rank, result in enumerate(found):
        if result.swallowed and about_exceptions:
            raise Wrong(
                {rank: "no_sync() swallows an exception that is raised inside it; expected the exception to propagate"}
            )
        for when, calls in result.calls.items():
            if ("exception" in when) != about_exceptions:
                continue
            if "inside" not in when:
                _judge_outside(rank, calls, sizes, when)
            elif calls:
                raise Wrong({rank: f"{sizes}, {when}: {describe_calls(calls)} sent; expected none"}, _hint_on(when))
        if result.pending is False and about_exceptions:
            evidence = (
                "backward() ran inside no_sync() before an exception ended the block, and sync.pending is False "
                "afterwards; expected True"
            )
            raise Wrong({rank: evidence}, _HINT_ON_PENDING)


def _judge_outside(rank: int, calls: list, sizes: Sizes, when: str) -> None:
    try:
        judge_messages(rank, calls, sizes.messages(), f"{sizes}, {when}")
    except Wrong as wrong:
        raise Wrong(wrong.evidence, wrong.hint if calls else _hint_on_silence(when)) from None


def _hint_on_silence(when: str) -> str:
    if "exception" in when:
        return "Hint: which of your lines run when such an exception leaves the with-block?"
    if "another" in when:
        return "Hint: where does no_sync() store its state, and what else reads it?"
    return "Hint: which attribute does no_sync() change, and which line changes it back when the block ends?"


def _hint_on(when: str) -> str:
    if "inner" in when:
        return "Hint: what was the state before the inner no_sync(), and which lines have changed it since?"
    if "finish" in when:
        return "Hint: what do the hooks do inside no_sync(), and what does finish_gradient_sync() do there?"
    return "Hint: which line launches the collective, and does it check whether no_sync() is active?"


def the_sum_is_sent(attempt: Attempt) -> None:
    """Try also a layer that only the micro-batches inside no_sync() use, on one rank or on all."""

    def micro(silent: bool, leaves_out: str = "") -> list[Micro]:
        shares = draw_shares(attempt, one_leaves_out=leaves_out == "one")
        for x, _ in shares if leaves_out == "all" else []:
            x[0, 1] = -1.0
        return [Micro(x, y, silent) for x, y in shares]

    def step(*micro_batches: list[Micro]) -> list[list[Micro]]:
        return [list(own) for own in zip(*micro_batches, strict=True)]

    sizes = draw_sizes(attempt, "Fork")
    steps = [step(micro(True), micro(True), micro(False)), step(micro(False)), step(micro(True, "one"), micro(False))]
    judge_steps(attempt, sizes, steps, "micro-batches inside no_sync(), the last one outside")
    for leaves_out, where in (("one", "one rank"), ("all", "all ranks")):
        context = f"a layer that the micro-batch inside no_sync() uses, but the last micro-batch on {where} does not"
        judge_steps(attempt, sizes, [step(micro(True), micro(False, leaves_out))], context)
    judge_steps(attempt, sizes, [step(micro(True), micro(True))], "all micro-batches inside no_sync()")
