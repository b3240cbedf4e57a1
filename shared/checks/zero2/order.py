"""When ZeRO2's buckets leave: in one order on all ranks, each when it is full, while backward goes on.

Nothing is judged by how long it took. What counts is which buckets had left when backward came to a layer.
"""

from itertools import pairwise

import torch
import torch.distributed as dist

from shared.checks.engine.buckets import describe_messages
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import by_rank, close, first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.latecomers import PATIENCE_S, Meeting, launches_unasked
from shared.checks.engine.overlap_probes import Micro
from shared.checks.engine.overlap_steps import draw_shares, mean_of
from shared.checks.models import awkward
from shared.checks.models.overlap import Sizes, draw_sizes
from shared.wire import instrumentation

LEARNING_RATE = 0.1
_LOOK_AT_HOOKS = "Nothing was sent in backward. Look at: who tells you that a gradient is complete, and when?"


def wrap(zero2, sizes: Sizes, seed: int, group=None):
    """→ the wrapped module, which steps by SGD, and the module"""
    module = sizes.build(seed).to(device_here())
    further = {} if group is None else {"group": group}
    return zero2(module, torch.optim.SGD, bucket_cap_mb=sizes.bucket_cap_mb, lr=LEARNING_RATE, **further), module


def backward(wrapped, x, y) -> None:
    awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward()


def told_apart(attempt: Attempt, model: str = "Chain", has_first: bool = False) -> Sizes:
    """Draw sizes whose buckets differ by more than their filling.

    has_first: there is a moment in backward when the first bucket is full, and no other.
    """
    while True:
        sizes = draw_sizes(attempt, model)
        found = sorted(message.nbytes for message in sizes.messages())
        apart = min(b - a for a, b in pairwise(found)) > 4 * 8 * attempt.world_size
        if apart and (not has_first or _first_alone(sizes) is not None):
            return sizes


def _first_alone(sizes: Sizes) -> int | None:
    """Find the place in a chain's backward where the first bucket is full, and only that."""
    places = [place for place in range(1, len(sizes.widths) - 1) if sizes.full_by(place) == 1]
    return max(places, default=None)


def left(calls: list[instrumentation.Call], sizes: Sizes, size: int) -> list[int]:
    """→ the numbers of the buckets that left, in order. Sent piece by piece, a bucket leaves with its first piece."""
    whole, numbers = [message.nbytes for message in sizes.messages()], []
    for call in calls:
        if call.op != "recv":
            sent_bytes = call.payload_bytes * (size if call.op == "send" else 1)
            number = min(range(len(whole)), key=lambda each: abs(whole[each] - sent_bytes))
            if number not in numbers:
                numbers.append(number)
    return numbers


def probe_order(zero2, sizes: Sizes, seed: int, x, y) -> list[instrumentation.Call]:
    """One backward in a group where nothing travels: ranks that launch in different orders do no harm there."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  so that the backend is known

    wrapped, _ = wrap(zero2, sizes, seed, dist.new_group(backend="fake"))
    with instrumentation.listening() as calls:
        backward(wrapped, x, y)
        wrapped.finish_gradient_sync()
    return calls


def every_rank_launches_in_one_order(attempt: Attempt) -> None:
    """Ranks compute branches in different orders, and one does without the last layer: its bucket is never full."""
    sizes, seed = told_apart(attempt, "Fork"), attempt.draw_seed()
    for one_leaves_out in (False, True):
        found = attempt.run(probe_order, sizes, seed, per_rank=draw_shares(attempt, one_leaves_out))
        said = "computed in another order on each rank" + one_leaves_out * ", the last layer unused on one of them"
        orders = {rank: left(calls, sizes, attempt.world_size) for rank, calls in enumerate(found)}
        if any(order != list(range(len(sizes.messages()))) for order in orders.values()):
            differ = len({tuple(order) for order in orders.values()}) > 1
            hint = "Ranks launch in different orders. Look at: who decides the order?"
            evidence = {
                rank: f"{sizes}, {said}: buckets left in the order {orders[rank]} ({describe_messages(calls)})"
                for rank, calls in enumerate(found)
            }
            raise Wrong(evidence, hint if differ else "Expected: one after the other, each of them once.")


def probe_progress(zero2, sizes: Sizes, seed: int, x, y) -> list[dict[int, list[instrumentation.Call]]]:
    """Two steps on a chain. → per step, what was launched by when in backward, and (−1) in finish_gradient_sync()"""
    wrapped, module = wrap(zero2, sizes, seed)
    steps = []
    for _ in range(2):
        launched = {}
        with instrumentation.listening() as calls:
            module.passed = lambda place, launched=launched, calls=calls: launched.setdefault(place, calls[:])
            backward(wrapped, x, y)
            launched[0] = calls[:]
            wrapped.finish_gradient_sync()
        wrapped.step()
        wrapped.zero_grad()
        steps.append(launched)
    return steps


def full_buckets_leave_while_backward_goes_on(attempt: Attempt) -> None:
    sizes, seed = told_apart(attempt), attempt.draw_seed()
    found = attempt.run(probe_progress, sizes, seed, per_rank=draw_shares(attempt))
    layers = len(sizes.widths) - 1
    for rank, steps in enumerate(found):
        for number, launched in enumerate(steps, 1):
            for place, calls in sorted(launched.items(), reverse=True):
                gone, full = left(calls, sizes, attempt.world_size), sizes.full_by(place)
                if len(gone) < full:
                    when = f"was done with layers {place + 1} to {layers}" if place else "had ended"
                    said = f"when backward {when}, {len(gone)} buckets had been launched; {full} were full"
                    late = "Look at: how soon after its last gradient is a bucket launched?"
                    hint = late if launched[0] else _LOOK_AT_HOOKS
                    raise Wrong({rank: f"{sizes}, step {number}: {said}"}, hint)


def probe_late(zero2, sizes: Sizes, token: int, late: int, first: int, rank: int, seed: int, x, y) -> dict:
    """A rank's backward sends nothing until all others have launched their first bucket, and go on computing.

    first: the place they come to then. → on the late rank, who had not come; the parameters after a step
    """
    wrapped, module = wrap(zero2, sizes, seed)
    meeting, missing, layers = Meeting(f"travel{token}"), [], len(sizes.widths) - 1

    def passed(place: int) -> None:
        if rank == late and place == layers:
            missing[:] = meeting.missing()
        if rank != late and place == first:
            meeting.come()

    module.passed = passed
    with launches_unasked():
        dist.barrier()
        backward(wrapped, x, y)
        wrapped.finish_gradient_sync()
        wrapped.step()
    return {"missing": missing, "parameters": awkward.state_of(module)}


def backward_goes_on_while_a_bucket_travels(attempt: Attempt) -> None:
    """And a step does not: what it leaves must hold the late rank's part."""
    sizes, seed, late = (
        told_apart(attempt, has_first=True),
        attempt.draw_seed(),
        attempt.random.randrange(attempt.world_size),
    )
    shares, token = draw_shares(attempt), attempt.draw_seed()
    per_rank = [(rank, seed, x, y) for rank, (x, y) in enumerate(shares)]
    found = attempt.run(probe_late, sizes, token, late, _first_alone(sizes), per_rank=per_rank)
    if missing := found[late]["missing"]:
        said = f"{sizes}: while rank {late} had sent nothing, backward() did not go on here behind the first bucket"
        hint = "Look at: which bucket does launch() wait for, and who waits for the one that it begins?"
        raise Wrong(dict.fromkeys(missing, f"{said} in {PATIENCE_S:g} s"), hint)
    mean, _ = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    start = dict(sizes.build(seed).named_parameters())
    for rank, parameters in by_rank(found, "parameters").items():
        for name, gradient in mean.items():
            want = start[name].detach() - LEARNING_RATE * gradient
            if not close(parameters[name], want):
                said = f"{sizes}, rank {late} late by a little: {name} after a step"
                difference = first_difference(parameters[name], want)
                hint = "Look at: what is waited for, before a step uses gradients?"
                raise Wrong({rank: f"{said}, {difference}"}, hint)
