"""When ZeRO2's buckets are launched: in one order on all ranks, each when it is full, while backward goes on.

Nothing is judged by how long it took. What counts is which buckets had been launched when backward came to a layer.
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
_LOOK_AT_HOOKS = (
    "Nothing was launched in backward. Look at: which object is told that a gradient is complete, and when?"
)


def wrap(zero2, sizes: Sizes, seed: int, group=None):
    """Wrap a model with SGD. Returns the wrapper, and the module in it."""
    module = sizes.build(seed).to(device_here())
    further = {} if group is None else {"group": group}
    return zero2(module, torch.optim.SGD, bucket_cap_mb=sizes.bucket_cap_mb, lr=LEARNING_RATE, **further), module


def backward(wrapped, x, y) -> None:
    awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward()


def told_apart(attempt: Attempt, model: str = "Chain", has_first: bool = False) -> Sizes:
    """Draw sizes whose buckets differ by more than their padding.

    Args:
        has_first: whether there must be a moment in backward when the first bucket is full, and no other.
    """
    while True:
        sizes = draw_sizes(attempt, model)
        found = sorted(message.nbytes for message in sizes.messages())
        apart = min(b - a for a, b in pairwise(found)) > 4 * 8 * attempt.world_size
        if apart and (not has_first or _first_alone(sizes) is not None):
            return sizes


def _first_alone(sizes: Sizes) -> int | None:
    """Find the layer in a chain's backward by which the first bucket is full, and no other."""
    layers = [layer for layer in range(1, len(sizes.widths) - 1) if sizes.full_by(layer) == 1]
    return max(layers, default=None)


def launched_buckets(calls: list[instrumentation.Call], sizes: Sizes, size: int) -> list[int]:
    """Return the indices of the buckets that were launched, in order: each with the first transfer of its size."""
    whole, numbers = [message.nbytes for message in sizes.messages()], []
    for call in calls:
        if call.op != "recv":
            sent_bytes = call.payload_bytes * (size if call.op == "send" else 1)
            number = min(range(len(whole)), key=lambda each: abs(whole[each] - sent_bytes))
            if number not in numbers:
                numbers.append(number)
    return numbers


def probe_order(zero2, sizes: Sizes, seed: int, x, y) -> list[instrumentation.Call]:
    """Run one backward in a fake group, in which nothing is sent: ranks may launch in different orders there."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  so that the backend is known

    wrapped, _ = wrap(zero2, sizes, seed, dist.new_group(backend="fake"))
    with instrumentation.listening() as calls:
        backward(wrapped, x, y)
        wrapped.finish_gradient_sync()
    return calls


def every_rank_launches_in_one_order(attempt: Attempt) -> None:
    """Ranks compute branches in different orders, and one does not use the last layer: its bucket is never full."""
    sizes, seed = told_apart(attempt, "Fork"), attempt.draw_seed()
    for one_leaves_out in (False, True):
        found = attempt.run(probe_order, sizes, seed, per_rank=draw_shares(attempt, one_leaves_out))
        said = (
            "whose branches each rank computes in another order"
            + one_leaves_out * ", the last layer unused on one rank"
        )
        orders = {rank: launched_buckets(calls, sizes, attempt.world_size) for rank, calls in enumerate(found)}
        if any(order != list(range(len(sizes.messages()))) for order in orders.values()):
            differ = len({tuple(order) for order in orders.values()}) > 1
            hint = (
                "The reduce-scatters add up unrelated gradients. Look at: what decides which bucket is launched next?"
            )
            evidence = {
                rank: f"{sizes}, {said}: buckets were launched in the order {orders[rank]} ({describe_messages(calls)})"
                for rank, calls in enumerate(found)
            }
            raise Wrong(
                evidence,
                hint
                if differ
                else "Expected: bucket 0, 1, 2 and so on, each of them once. Look at: which bucket is next?",
            )


def probe_progress(zero2, sizes: Sizes, seed: int, x, y) -> list[dict[int, list[instrumentation.Call]]]:
    """Take two steps on a chain. Returns for each step what was launched by each layer, and (0) by backward's end."""
    wrapped, module = wrap(zero2, sizes, seed)
    steps = []
    for _ in range(2):
        launched = {}
        with instrumentation.listening() as calls:
            module.passed = lambda layer, launched=launched, calls=calls: launched.setdefault(layer, calls[:])
            backward(wrapped, x, y)
            launched[0] = calls[:]
            wrapped.finish_gradient_sync()
        wrapped.step()
        wrapped.zero_grad()
        steps.append(launched)
    return steps


def full_buckets_are_launched_during_backward(attempt: Attempt) -> None:
    sizes, seed = told_apart(attempt), attempt.draw_seed()
    found = attempt.run(probe_progress, sizes, seed, per_rank=draw_shares(attempt))
    layers = len(sizes.widths) - 1
    for rank, steps in enumerate(found):
        for number, launched in enumerate(steps, 1):
            for layer, calls in sorted(launched.items(), reverse=True):
                gone, full = launched_buckets(calls, sizes, attempt.world_size), sizes.full_by(layer)
                if len(gone) < full:
                    when = f"was done with layers {layer + 1} to {layers}" if layer else "had ended"
                    said = f"when backward {when}, {len(gone)} buckets had been launched, but {full} were full"
                    late = "Look at: after its last gradient, what does a full bucket still wait for?"
                    hint = late if launched[0] else _LOOK_AT_HOOKS
                    raise Wrong({rank: f"{sizes}, step {number}: {said}"}, hint)


def probe_late(zero2, sizes: Sizes, token: int, late: int, first: int, rank: int, seed: int, x, y) -> dict:
    """Let one rank send nothing in backward until all others have launched their first bucket, and go on computing.

    Args:
        first: the layer that they come to then.

    Returns:
        On the late rank, the ranks that had not come; and the parameters after a step.
    """
    wrapped, module = wrap(zero2, sizes, seed)
    meeting, missing, layers = Meeting(f"bucket{token}"), [], len(sizes.widths) - 1

    def passed(layer: int) -> None:
        if rank == late and layer == layers:
            missing[:] = meeting.missing()
        if rank != late and layer == first:
            meeting.come()

    module.passed = passed
    with launches_unasked():
        dist.barrier()
        backward(wrapped, x, y)
        wrapped.finish_gradient_sync()
        wrapped.step()
    return {"missing": missing, "parameters": awkward.state_of(module)}


def backward_goes_on_while_a_bucket_is_in_flight(attempt: Attempt) -> None:
    """A step does not: its result must contain the late rank's gradients."""
    sizes, seed, late = (
        told_apart(attempt, has_first=True),
        attempt.draw_seed(),
        attempt.random.randrange(attempt.world_size),
    )
    shares, token = draw_shares(attempt), attempt.draw_seed()
    per_rank = [(rank, seed, x, y) for rank, (x, y) in enumerate(shares)]
    found = attempt.run(probe_late, sizes, token, late, _first_alone(sizes), per_rank=per_rank)
    if missing := found[late]["missing"]:
        said = f"{sizes}: while rank {late} had launched nothing, backward() stopped here at the first bucket"
        hint = "Look at: which bucket does launch() wait for, and which method waits for the one that it launches?"
        raise Wrong(dict.fromkeys(missing, f"{said} for {PATIENCE_S:g} s"), hint)
    mean, _ = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    start = dict(sizes.build(seed).named_parameters())
    for rank, parameters in by_rank(found, "parameters").items():
        for name, gradient in mean.items():
            want = start[name].detach() - LEARNING_RATE * gradient
            if not close(parameters[name], want):
                said = f"{sizes}, rank {late} launches a little later than the others: {name} after a step"
                difference = first_difference(parameters[name], want)
                hint = "Look at: what does step() wait for before it uses gradients?"
                raise Wrong({rank: f"{said}, {difference}"}, hint)
