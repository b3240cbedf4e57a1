"""Call the functions of chapter 02 on a rank, and record their results and messages."""

from itertools import chain

import torch
from torch import nn

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
    marked = _marks(module)
    with instrumentation.listening() as calls:
        if member:
            broadcast_state(module, group)
    return {"state": awkward.state_of(module), "calls": calls, "kept": marked == _marks(module)}


def _marks(module: nn.Module) -> list[tuple]:
    """List which object each tensor is, where its elements are, and whether it is trained."""
    return [(id(t), t.data_ptr(), t.requires_grad) for t in chain(module.parameters(), module.buffers())]


def probe_average(
    average_gradients, model: str, in_subgroup: bool, seed: int, x, y, *extra, old_gradients: bool = False
) -> dict:
    """Run backward, then the student's function.

    Args:
        average_gradients: The student's function.
        model: The name of the model.
        in_subgroup: Whether only the ranks of a group call the function.
        seed: The seed of the model's weights.
        x: The inputs.
        y: The targets.
        extra: The function's arguments between the module and the group.
        old_gradients: Whether frozen parameters have a gradient from before they were frozen.
    """
    group, member = join_subgroup(in_subgroup)
    module = awkward.build(model, seed).to(device_here())
    if len(x):
        awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    for parameter in module.parameters():
        if old_gradients and not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    local = awkward.gradients_of(module)
    with instrumentation.listening() as calls:
        if member:
            average_gradients(module, *extra, group)
    recorded = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.requires_grad]
    if recorded:
        raise AssertionError(
            f"the .grad of {recorded[0]} requires a gradient itself: which operation in your code does autograd record?"
        )
    gradients = awkward.gradients_of(module)
    return {"gradients": gradients, "local": local, "calls": calls, "frozen": frozen_with_gradient(module)}


def probe_average_beside_old_gradients(average_gradients, *args) -> dict:
    return probe_average(average_gradients, *args, old_gradients=True)


def probe_many_samples(average_gradients_weighted, own: float, samples: int) -> float:
    """Average a float64 gradient, in a module whose first parameter is in bf16, which rounds numbers above 256."""
    dtypes = torch.bfloat16, torch.float64
    module = nn.ParameterList(torch.zeros(2, dtype=dtype, device=device_here()) for dtype in dtypes)
    for parameter in module:
        parameter.grad = torch.full_like(parameter, own)
    average_gradients_weighted(module, samples)
    return module[1].grad[0].item()
