"""Judge a bucket: which gradients it takes, and that after wait(), only this rank's shard stays in memory."""

import time

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.sharded.flat_layout import flat_parameter_type_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.sharded_bucket import build, cause_of_scale
from shared.deadlines import scaled

# -- judge what ShardedBucket does with gradients that it cannot send, and with those that are missing


def probe_graph(sharded_bucket, seed: int, x, y) -> tuple[str, str] | None:
    """Return the error that a differentiable gradient raises: its type and its message."""
    module = awkward.build("Plain", seed).to(device_here())
    _, bucket = build(sharded_bucket, module)
    awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward(create_graph=True)
    try:
        bucket.pack(0)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        module.zero_grad()  # a gradient that is part of a graph keeps itself alive
    return None


def gradients_with_a_graph_are_rejected(attempt: Attempt) -> None:
    for rank, error in enumerate(attempt.run(probe_graph, per_rank=Draw(attempt).per_rank)):
        kind, message = error or (None, "")
        if kind != "RuntimeError" or "create_graph" not in message:
            does = f"raises {kind}({message[:80]!r})" if kind else "accepts the gradient"
            context = f"after backward(create_graph=True), pack(0) {does}"
            expected = "expected a RuntimeError that names create_graph"
            hint = "Hint: can autograd differentiate through a reduce-scatter?"
            raise Wrong({rank: f"{context}; {expected}"}, hint)


def probe_none(sharded_bucket, seed: int, x, y, computes: bool) -> dict:
    """Reduce the gradients of a bucket for which this rank may have computed none."""
    module = awkward.build("Plain", seed).to(device_here())
    flat_parameter, bucket = build(sharded_bucket, module)
    parameters = flat_parameter.layout.parameters
    known = [id(p) for p in getattr(bucket, "parameters", [])] == [id(p) for p in parameters]
    if computes:
        awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    for index in range(len(parameters)):
        bucket.pack(index)
    bucket.launch()
    bucket.wait()
    grad = flat_parameter.shard.grad
    return {
        "known": known,
        "own": torch.cat([each.flatten() for each in own]).cpu(),
        "grad": None if grad is None else grad.detach().cpu().flatten(),
    }


def no_gradient_counts_as_zeros(attempt: Attempt) -> None:
    """Try a bucket whose gradients only one rank computed, or none. Require also the attribute `parameters`."""
    size = attempt.world_size
    for who in (attempt.random.randrange(size) if size > 1 else None, None):
        computing = "no rank has" if who is None else f"only rank {who} has"
        per_rank = [(*share, rank == who) for rank, share in enumerate(Draw(attempt).per_rank)]
        context = f"a bucket whose gradients {computing} computed"
        hint = "Hint: what does a rank send if all of its gradients are None?"
        try:
            found = attempt.run(probe_none, per_rank=per_rank, context=context)
        except Wrong as wrong:
            wrong.hint = wrong.hint or hint
            raise
        flat = total_of(each["own"] for each in found) / size
        expected = torch.cat([flat, flat.new_zeros(-len(flat) % size)]).view(size, -1)
        for rank, each in enumerate(found):
            if not each["known"]:
                evidence = ".parameters is not the list of the layout's parameters"
                raise Wrong({rank: evidence}, "Hint: which attribute of a bucket does lab 04's LaunchQueue read?")
            if each["grad"] is None or not nearly_equal(each["grad"], expected[rank]):
                was = (
                    "is None" if each["grad"] is None else f"is wrong: {first_difference(each['grad'], expected[rank])}"
                )
                cause = "" if each["grad"] is None else cause_of_scale(each["grad"], expected[rank], size)
                raise Wrong({rank: f"{context}: shard.grad {was}"}, cause or hint)


SLACK = 1.02  # padding
_SETTLES_WITHIN_S = scaled(0.5)  # gloo's threads release a message's tensor a little after the message is complete
PACKED, SECOND, REDUCED = "when both are packed", "when the second is launched", "when both are reduced"
_HINT_ON_VIEW = "Hint: what does the handle's wait() return, and what does shard.grad need instead?"
_HINTS = {
    PACKED: (
        "Hint: once a gradient is in the flat tensor, what still refers to it? And when are flat tensors allocated?"
    ),
    SECOND: "Hint: which tensor should wait() free, what else refers to it, and when is it allocated?",
    REDUCED: "Hint: does the remaining tensor have memory of its own, or is it a view of a larger one?",
}


def probe_memory(sharded_bucket, most_bytes: dict[str, float], seed: int, x, y) -> tuple[dict[str, int], bool]:
    """Reduce a model's gradients in two halves.

    Returns:
        The bytes that live besides the parameters, by moment, and whether a shard.grad is a view of a larger tensor.
    """
    flat_parameter_type = flat_parameter_type_of(sharded_bucket)
    module = awkward.build("Large", seed, torch.float32).to(device_here())
    parameters, found = list(module.parameters()), {}
    middle = len(parameters) // 2
    halves = [flat_parameter_type(parameters[middle:], None), flat_parameter_type(parameters[:middle], None)]
    x, y = x.to(device_here(), torch.float32), y.to(device_here(), torch.float32)
    before_bytes = living_bytes()

    def note(when: str) -> None:
        began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
        while held_bytes > most_bytes[when] and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
            time.sleep(0.01)
            held_bytes = min(held_bytes, living_bytes() - before_bytes)
        found[when] = held_bytes

    first, second = (sharded_bucket(half) for half in halves)
    second.previous = first
    awkward.loss_of(module, x, y).backward()
    for bucket, half in zip((first, second), halves, strict=True):
        for index in range(len(half.layout.parameters)):
            bucket.pack(index)
        if bucket is second:
            note(PACKED)
        bucket.launch()
    note(SECOND)
    for bucket in (first, second):
        bucket.wait()
    note(REDUCED)
    means = [half.shard.grad for half in halves]
    return found, any(mean is not None and mean.untyped_storage().nbytes() > SLACK * mean.nbytes for mean in means)


def only_a_shard_stays(attempt: Attempt) -> None:
    """Allow the second half a receive buffer as large as the bucket, because an all-to-all needs one."""
    sizes = [p.nbytes for p in awkward.build("Large", 0, torch.float32).parameters()]
    size, first, second = attempt.world_size, sum(sizes[len(sizes) // 2 :]), sum(sizes[: len(sizes) // 2])
    expected = {
        PACKED: second + 2 * first,  # the first is in flight
        SECOND: first / size + 2 * second,
        REDUCED: (first + second) / size,
    }
    most = {when: SLACK * nbytes for when, nbytes in expected.items()}
    for rank, (found, is_view) in enumerate(attempt.run(probe_memory, most, per_rank=Draw(attempt).per_rank)):
        for when, held_bytes in found.items():
            if held_bytes > most[when]:
                context = f"two buckets of {first:,} and {second:,} bytes: {when}, gradients, flat tensors and receive"
                evidence = f"{context} buffers hold {held_bytes:,} bytes; expected at most {expected[when]:,.0f}"
                if is_view and when != PACKED:
                    raise Wrong({rank: f"{evidence}. shard.grad shares memory with the flat tensor"}, _HINT_ON_VIEW)
                raise Wrong({rank: evidence}, _HINTS[when])
