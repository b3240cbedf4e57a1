"""Call the functions of chapter 02 on a rank, and record their results and messages."""

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.subgroups import join_subgroup
from shared.checks.engine.training import frozen_with_gradient
from shared.checks.models import awkward
from shared.wire import instrumentation


def probe_mean(mean_over_ranks_, in_subgroup: bool, values: torch.Tensor) -> dict:
    group, member = join_subgroup(in_subgroup)
    given = values.to(device_here())
    tensor = given[...]  # a view, so that a mean that is not computed in place is noticed
    with instrumentation.listening() as calls:
        if member:
            mean_over_ranks_(tensor, group) if in_subgroup else mean_over_ranks_(tensor)
    return {"value": given.cpu().clone(), "calls": calls}


def probe_broadcast(broadcast_state, model: str, in_subgroup: bool, seed: int) -> dict:
    group, member = join_subgroup(in_subgroup)
    module = awkward.build(model, seed).to(device_here())
    flags = [(id(p), p.requires_grad) for p in module.parameters()]
    with instrumentation.listening() as calls:
        if member:
            broadcast_state(module, group)
    kept = flags == [(id(p), p.requires_grad) for p in module.parameters()]
    return {"state": awkward.state_of(module), "calls": calls, "kept": kept}


def probe_average(average_gradients, model: str, in_subgroup: bool, seed: int, x, y, *extra) -> dict:
    """Run backward, then the student's function. `extra` are its arguments between the module and the group."""
    group, member = join_subgroup(in_subgroup)
    module = awkward.build(model, seed).to(device_here())
    if len(x):
        awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    local = awkward.gradients_of(module)
    with instrumentation.listening() as calls:
        if member:
            average_gradients(module, *extra, group)
    gradients = awkward.gradients_of(module)
    return {"gradients": gradients, "local": local, "calls": calls, "frozen": frozen_with_gradient(module)}
