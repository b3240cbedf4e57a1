"""Judge when ZeRO2's buckets are launched: in one order on all ranks, each when it is full, while backward goes on.

The checks never use elapsed time. They judge which buckets have been launched when backward reaches a layer.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import describe_messages
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.overlap_models import Sizes, draw_sizes
from shared.checks.engine.overlap_probes import Micro, probe_graph, probe_order, probe_progress, wrap
from shared.checks.engine.overlap_steps import draw_shares, mean_of
from shared.checks.engine.rejections import judge_errors
from shared.checks.models import awkward
from shared.wire import instrumentation

LEARNING_RATE = 0.1
SGD = {"optimizer_cls": torch.optim.SGD, "lr": LEARNING_RATE}
_HINT_ON_ORDER = "The reduce-scatters add up unrelated gradients. Hint: what decides which bucket is launched next?"
_HINT_ON_HOOKS = (
    "No bucket was launched during backward. Hint: which object is told that a gradient is complete, and when?"
)


def distinct_sizes(attempt: Attempt, model: str = "Chain", has_first: bool = False) -> Sizes:
    """Draw sizes whose buckets differ by more than their padding.

    Args:
        has_first: whether there must be a moment in backward when the first bucket is full, and no other.
    """
    while True:
        sizes = draw_sizes(attempt, model, SGD)
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
    bucket_bytes, indices = [message.nbytes for message in sizes.messages()], []
    for call in calls:
        if call.op != "recv":
            sent_bytes = call.payload_bytes * (size if call.op == "send" else 1)
            index = min(range(len(bucket_bytes)), key=lambda index: abs(bucket_bytes[index] - sent_bytes))
            if index not in indices:
                indices.append(index)
    return indices


def every_rank_launches_in_one_order(attempt: Attempt) -> None:
    """Try branches that ranks compute in different orders, and a last layer that one rank never uses."""
    sizes, seed = distinct_sizes(attempt, "Fork"), attempt.draw_seed()
    for one_leaves_out in (False, True):
        found = attempt.run(probe_order, sizes, seed, per_rank=draw_shares(attempt, one_leaves_out))
        context = f"ranks compute their branches in different orders{', and one skips the last layer' * one_leaves_out}"
        orders = {rank: launched_buckets(calls, sizes, attempt.world_size) for rank, calls in enumerate(found)}
        if any(order != list(range(len(sizes.messages()))) for order in orders.values()):
            evidence = {
                rank: f"{sizes}, {context}: buckets were launched in the order {order} "
                f"({describe_messages(found[rank])})"
                for rank, order in orders.items()
            }
            same = len({tuple(order) for order in orders.values()}) == 1
            expected = "Expected buckets 0, 1, 2 and so on, each once. Hint: how do you find the next bucket?"
            raise Wrong(evidence, expected if same else _HINT_ON_ORDER)


def full_buckets_are_launched_during_backward(attempt: Attempt) -> None:
    sizes, seed = distinct_sizes(attempt), attempt.draw_seed()
    found = attempt.run(probe_progress, sizes, seed, per_rank=draw_shares(attempt))
    layers = len(sizes.widths) - 1
    for rank, number, step in [(rank, number, each[number]) for rank, each in enumerate(found) for number in (0, 1)]:
        for layer, count in sorted((step.launched | {0: len(step.working)}).items(), reverse=True):
            launched = launched_buckets(step.calls[:count], sizes, attempt.world_size)
            if len(launched) < (full := sizes.full_by(layer)):
                when = f"had finished layers {layer + 1} to {layers}" if layer else "had ended"
                evidence = (
                    f"{sizes}, step {number + 1}: when backward {when}, {len(launched)} buckets had been launched; "
                    f"expected {full}, the number of full buckets"
                )
                late = "Hint: after its last gradient, what is a full bucket still waiting for?"
                raise Wrong({rank: evidence}, late if step.working else _HINT_ON_HOOKS)


@dataclass
class Stepped:
    missing: list[int]  # on the late rank, the ranks that had not arrived before it went on
    parameters: dict[str, torch.Tensor]  # after a step


@rehearsed
def probe_late(zero2, sizes: Sizes, token: int, late: int, first: int, rank: int, seed: int, x, y) -> Stepped:
    """Let one rank send nothing in backward until all others have launched their first bucket, and go on computing.

    Args:
        first: The layer that the others reach by then.
    """
    wrapped, module = wrap(zero2, sizes, seed)
    meeting, missing, layers = Rendezvous(f"bucket{token}"), [], len(sizes.widths) - 1

    def passed(layer: int) -> None:
        if rank == late and layer == layers:
            missing[:] = meeting.missing()
        if rank != late and layer == first:
            meeting.arrive()

    module.passed = passed
    with launches_unasked():
        dist.barrier()
        awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward()
        wrapped.finish_gradient_sync()
        wrapped.step()
    return Stepped(missing, awkward.state_of(module))


def backward_goes_on_while_a_bucket_is_in_flight(attempt: Attempt) -> None:
    """Check also that step() does wait: its result must contain the late rank's gradients."""
    sizes, seed = distinct_sizes(attempt, has_first=True), attempt.draw_seed()
    late, token, shares = attempt.random.randrange(attempt.world_size), attempt.draw_seed(), draw_shares(attempt)
    per_rank = [(rank, seed, x, y) for rank, (x, y) in enumerate(shares)]
    found = attempt.run(probe_late, sizes, token, late, _first_alone(sizes), per_rank=per_rank)
    if missing := found[late].missing:
        evidence = (
            f"{sizes}: while rank {late} had launched nothing, backward() stopped on this rank at the first bucket for "
            f"{PATIENCE_S:g} s"
        )
        hint = "Hint: which bucket does launch() wait for, and which method waits for the bucket it launches?"
        raise Wrong(dict.fromkeys(missing, evidence), hint)
    mean, _ = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    start = dict(sizes.build(seed).named_parameters())
    for rank, stepped in enumerate(found):
        for name, gradient in mean.items():
            expected = start[name].detach() - LEARNING_RATE * gradient
            if not nearly_equal(stepped.parameters[name], expected):
                context = f"{sizes}, rank {late} launches a little later than the others: {name} after a step"
                evidence = f"{context} is wrong: {first_difference(stepped.parameters[name], expected)}"
                raise Wrong({rank: evidence}, "Hint: what does step() wait for before it uses gradients?")


def a_graph_is_rejected(attempt: Attempt) -> None:
    sizes = draw_sizes(attempt, options=SGD)
    errors = attempt.run(probe_graph, sizes, attempt.draw_seed(), per_rank=draw_shares(attempt))
    hint = "Hint: can autograd differentiate through a reduce-scatter?"
    judge_errors(errors, "backward(create_graph=True)", names="create_graph", hint=hint)
