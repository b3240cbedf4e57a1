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

import math
import warnings
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shared.guards.names import name_of

UNUSED = -0.0  # what a rank sends for a gradient of None: see the note above

_unnamed = weakref.WeakKeyDictionary()  # FlatParameter: the parameters that no warning has named


def is_unused(mean: torch.Tensor) -> bool:
    """Tell whether every rank has sent UNUSED for each element of a mean."""
    real = torch.view_as_real(mean)[..., 0] if mean.is_complex() else mean
    return mean.numel() > 0 and bool((torch.signbit(real) & (real == 0)).all())


def restore_none(parameters: Iterable[nn.Parameter]) -> None:
    """Set gradients that no rank has computed to None again."""
    for parameter in parameters:
        if parameter.grad is not None and is_unused(parameter.grad):
            parameter.grad = None


def warn_of_unused(flat_parameters: Iterable) -> None:
    """Warn of parameters that no rank has used, because a sharded optimizer updates them all the same.

    Call this before each step, when every shard.grad is a mean. Each parameter is named once, by the ranks that own a
    part of it. A step reads one element per parameter; on a GPU, where the CPU would have to wait, only the first does.
    """
    unused = [parameter for flat_parameter in flat_parameters for parameter in _unused_in(flat_parameter)]
    if unused:
        others = " and others" if unused[3:] else ""
        warnings.warn(
            f"no rank has a gradient for {', '.join(map(name_of, unused[:3]))}{others}. A sharded "
            "optimizer counts that as zeros, so weight decay and momentum still change it, unlike in one process: "
            "freeze what you do not train",
            stacklevel=4,
        )


def _unused_in(flat_parameter) -> list[nn.Parameter]:
    """Return parameters that no rank has used in this step, and that have not been returned before."""
    mean = flat_parameter.shard.grad
    if mean is None or mean.is_meta or (flat_parameter in _unnamed and not mean.is_cpu):
        return []
    if flat_parameter not in _unnamed:
        _unnamed[flat_parameter] = _own_slices(flat_parameter.layout, mean.numel())
    slices = _unnamed[flat_parameter]
    first_elements = mean[[own.start for own in slices.values()]].tolist()
    unused = [
        parameter
        for (parameter, own), first in zip(slices.items(), first_elements, strict=True)
        if first == 0 and math.copysign(1, first.real) < 0 and is_unused(mean[own])
    ]
    for parameter in unused:
        del slices[parameter]
    return unused


def _own_slices(layout, shard_numel: int) -> dict[nn.Parameter, slice]:
    """Return where parameters lie in this rank's shard, for those that have an element there."""
    slices, begin = {}, -dist.get_rank(layout.group) * shard_numel
    for parameter in layout.parameters:
        end = begin + parameter.numel()
        if max(begin, 0) < min(end, shard_numel):
            slices[parameter] = slice(max(begin, 0), min(end, shard_numel))
        begin = end
    return slices
