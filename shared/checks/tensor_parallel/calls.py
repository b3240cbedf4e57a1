"""Several calls of an operator before the first backward, as in every model, and with more than one group."""

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel.probe import join_one_of
from shared.checks.tensor_parallel.cases import BATCH, TOKENS

_GROUPS = [[0, 1], [2]]  # in some calls; the others are among all ranks


def probe_calls(operator, seed: int) -> list[str]:
    """Call the operator three times before backward. Returns what differs from three calls with a backward each."""
    group, _ = join_one_of(_GROUPS)
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    drawn = torch.randn(3, BATCH, TOKENS, 6, generator=generator, dtype=torch.float64).to(device_here())
    inputs, groups = [each.clone().requires_grad_() for each in drawn], (group, None, group)

    alone = []
    for x, its_group in zip(inputs, groups, strict=True):
        y = operator(x, its_group)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        alone.append((y.detach().clone(), gradient.clone()))

    outputs = [operator(x, its_group) for x, its_group in zip(inputs, groups, strict=True)]
    gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), inputs)
    differs = []
    for index, (y, gradient, (own_y, own_gradient)) in enumerate(zip(outputs, gradients, alone, strict=True)):
        differs += [] if nearly_equal(y.detach(), own_y) else [f"the output of call {index + 1}"]
        differs += [] if nearly_equal(gradient, own_gradient) else [f"the gradient of call {index + 1}"]
    return differs


def calls_do_not_share_anything(attempt: Attempt) -> None:
    context = f"three calls, of which the first and third are in the groups {' and '.join(map(str, _GROUPS))}"
    for rank, differs in enumerate(attempt.run(probe_calls, attempt.draw_seed(), context=context)):
        if differs:
            message = f"{context}: {differs[0]} differs from that of the same call alone"
            hint = "Hint: where does a call keep what it needs later, and can the next call overwrite that?"
            raise Wrong({rank: message}, hint)
