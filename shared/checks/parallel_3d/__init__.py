"""Checks for chapter 18 (3d_parallelism)."""

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Exercise, Wrong
from shared.checks.engine.subgroups import join_subgroup
from shared.checks.models import awkward
from shared.wire import instrumentation

gradient_norm = Exercise("18.1", "gradient_norm")


# -- on a rank, beside the student's code


def probe_norm(gradient_norm, model: str, in_subgroup: bool, seed: int, has_gradients: bool) -> dict:
    """Run backward on this rank's own model, then the student's function."""
    group, is_member = join_subgroup(in_subgroup)
    module = awkward.build(model, seed).to(device_here())
    if has_gradients:
        x = torch.ones(2, awkward.INPUTS, dtype=torch.float64, device=device_here())
        module(x).square().sum().backward()
    squares = sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None)
    norm = None
    with instrumentation.listening() as calls:
        if is_member:
            norm = gradient_norm(module, group) if in_subgroup else gradient_norm(module)
    return {"is_member": is_member, "squares": squares, "norm": norm, "calls": calls}


# -- 18.1


@gradient_norm.check("plain model", world_sizes=(2,))
def a_plain_model_on_two_ranks(attempt: Attempt) -> None:
    _judge_norm(attempt, "Plain")


@gradient_norm.check("awkward models")
def groups_and_missing_gradients(attempt: Attempt) -> None:
    for model in ("Frozen", "Unused", "Tied"):
        _judge_norm(attempt, model)
    _judge_norm(attempt, "Plain", idle_rank=attempt.random.randrange(attempt.world_size))
    if attempt.world_size > 2:
        _judge_norm(attempt, "Plain", in_subgroup=True)


def _judge_norm(attempt: Attempt, model: str, in_subgroup: bool = False, idle_rank: int | None = None) -> None:
    own = [(attempt.draw_seed(), rank != idle_rank) for rank in range(attempt.world_size)]
    tried = awkward.describe(model) + (", called by a subgroup" if in_subgroup else "")
    tried += "" if idle_rank is None else f", no gradient on rank {idle_rank}"
    found = attempt.run(probe_norm, model, in_subgroup, per_rank=own, context=tried)
    members = {rank: result for rank, result in enumerate(found) if result["is_member"]}
    expected = sum(result["squares"] for result in members.values()) ** 0.5
    for rank, result in members.items():
        norm, calls = result["norm"], result["calls"]
        if not isinstance(norm, torch.Tensor) or norm.shape != () or norm.dtype != torch.float64:
            raise Wrong({rank: f"{tried}: expected a float64 tensor without dimensions, got {norm!r}"})
        if abs(norm.item() - expected) > 1e-10 * max(1.0, expected):
            hint = "Hint: what can be added up over ranks, norms or their squares?"
            raise Wrong({rank: f"{tried}: the norm is {norm.item():.6g}, expected {expected:.6g}"}, hint)
        if [(call.op, call.payload_bytes) for call in calls] != [("all_reduce", 8)]:
            raise Wrong({rank: f"{tried}: {describe_calls(calls)}; expected 1 all_reduce of 8 bytes"})
