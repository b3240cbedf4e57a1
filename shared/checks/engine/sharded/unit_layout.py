"""Compute which unit owns which parameters, and how many bytes it has, without the student's code."""

from dataclasses import dataclass

import torch
from torch import nn

from shared.checks.engine.sharded.wire import Flat
from shared.checks.models import unit_models


@dataclass(frozen=True)
class FlatPart:
    """A unit's parameters of one dtype, which are all trainable or all frozen.

    Attributes:
        stored: The flat tensor in the parameters' dtype.
        computed: The flat tensor in compute_dtype.
        trainable: Whether the parameters are trainable.
    """

    stored: Flat
    computed: Flat
    trainable: bool


@dataclass(frozen=True)
class Layout:
    units: tuple[tuple[FlatPart, ...], ...]
    root: tuple[FlatPart, ...]

    def parts(self) -> list[FlatPart]:
        return [part for unit in (*self.units, self.root) for part in unit]


def owners(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Assign each parameter to the innermost unit that contains it, or to the module if there is not exactly one."""
    around: dict[nn.Parameter, set] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        inner, innermost = module, module
        for step in name.split(".")[:-1]:
            inner = getattr(inner, step)
            innermost = inner if inner in units else innermost
        around.setdefault(parameter, set()).add(innermost)
    owned = {each: [] for each in (*units, module)}
    for parameter, candidates in around.items():
        owned[candidates.pop() if len(candidates) == 1 else module].append(parameter)
    return owned


def layout_of(model: str, dtype: torch.dtype = torch.float64, compute_dtype: torch.dtype | None = None) -> Layout:
    module = unit_models.build(model, 0, dtype)
    *units, root = owners(module, unit_models.units_of(model, module)).values()
    return Layout(tuple(_parts(each, compute_dtype) for each in units), _parts(root, compute_dtype))


def _parts(parameters: list[nn.Parameter], compute_dtype: torch.dtype | None) -> tuple[FlatPart, ...]:
    numbers: dict = {}
    for each in parameters:
        kind = each.dtype, each.requires_grad
        numbers[kind] = numbers.get(kind, 0) + each.numel()
    return tuple(
        FlatPart(Flat(count, dtype.itemsize), Flat(count, (compute_dtype or dtype).itemsize), trainable)
        for (dtype, trainable), count in numbers.items()
    )
