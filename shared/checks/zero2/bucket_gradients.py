"""Judge what ShardedBucket does with gradients that it cannot send, and with those that are missing."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.sharded_bucket import build, cause_of_scale


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
        flat = sum(each["own"] for each in found) / size
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
