"""Gradients of None: parameters that no rank has used, told apart from those that only some ranks have not used.

[Note: negative zeros]
In one process, a parameter that the batch did not use has a gradient of None, and the optimizer skips it: no weight
decay, no momentum. A rank cannot leave such a parameter out of a collective, because another rank may have used it. So
it sends zeros for None. But if all ranks do, the mean is zero, not None, and how would they know?

Floating-point numbers have two zeros, which compare as equal. A sum is −0.0 only if every term is: −0.0 + −0.0 = −0.0,
but −0.0 + 0.0 = 0.0, and −0.0 + x = x. So a rank sends −0.0 for None. It adds nothing to the sum, and if every element
of the mean is −0.0, no rank had a gradient. Ranks learn that without another collective or another byte.

(One case is wrong: every element of every rank's gradient was itself −0.0. It then counts as None.)
"""

from collections.abc import Iterable

import torch
from torch import nn

UNUSED = -0.0  # what a rank sends for a gradient of None: see the note above


def is_unused(mean: torch.Tensor) -> bool:
    """Tell whether every rank has sent UNUSED for each element of a mean."""
    real = torch.view_as_real(mean)[..., 0] if mean.is_complex() else mean
    return mean.numel() > 0 and bool((torch.signbit(real) & (real == 0)).all())


def restore_none(parameters: Iterable[nn.Parameter]) -> None:
    """Set gradients that no rank has computed to None again."""
    for parameter in parameters:
        if parameter.grad is not None and is_unused(parameter.grad):
            parameter.grad = None
