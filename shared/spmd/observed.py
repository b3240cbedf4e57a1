"""Finds out whether each tensor of a split model is replicated, sharded or partial, by running it.

    # on every rank; rank 1 changes its shard of one parameter before the second step
    observed = spmd.observe(split_model, step, change="blocks.0.up.weight", on_rank=1)

    # in the notebook
    whole = spmd.observe(whole_model, step)
    seen = spmd.compare(ranks.pull("observed"), whole)
    plots.placements.placements({"my model": seen})

The tensors are the outputs of all modules, and the gradients of all parameters. Each is compared with the same tensor
of a model that is not split. The names are those of `torch.distributed.tensor`. Values can be equal by chance, for
example if they are zeros, so a tensor counts as replicated only if it is still the same on all ranks after one rank
has changed a parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

REPLICATE, PARTIAL, UNKNOWN = "Replicate()", "Partial()", "none of these"


@dataclass(frozen=True)
class Observed:
    """The tensors of one rank by name, in the order of the step: before a parameter was changed, and after that."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """What is known about one tensor.

    Attributes:
        placement: "Replicate()", "Partial()", "Shard(1)" and so on, or "none of these".
        changes: For each rank, how much its values changed, relative to their norm.
    """

    name: str
    placement: str
    changes: list[float]

    @property
    def is_gradient(self) -> bool:
        return self.name.endswith(".grad")


def observe(
    model: nn.Module,
    step: Callable[[nn.Module], object],
    change: str | None = None,
    on_rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Observed:
    """Run step(model) twice, and return the outputs of all modules and the gradients of all parameters.

    Args:
        step: Runs forward and backward.
        change: The name of a parameter. Between the two steps, one rank adds noise to its values. They are restored at
            the end.
        on_rank: The rank in the group that does so.
    """
    before = _tensors_of(model, step)
    if change is None:
        return Observed(before, before)
    parameter = model.get_parameter(change)
    kept = parameter.detach().clone()
    if dist.get_rank(group) == on_rank:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(on_rank)
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter += 0.1 * parameter.std() * noise
    try:
        return Observed(before, _tensors_of(model, step))
    finally:
        parameter.data.copy_(kept)


def _tensors_of(model: nn.Module, step: Callable) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(_module, _inputs, output) -> None:
            if isinstance(output, Tensor):
                tensors[name] = output.detach().cpu().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    model.zero_grad()
    try:
        step(model)
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"{name}.grad"] = parameter.grad.detach().cpu().clone()
    return tensors


def compare(observed: Sequence[Observed], whole: Observed) -> list[Seen]:
    """Compare the tensors of all ranks, in rank order, with those of a model that is not split.

    A tensor that the whole model does not have is left out.
    """
    seen = []
    for name, expected in whole.before.items():
        if not all(name in of_rank.before for of_rank in observed):
            continue
        before, after = ([getattr(each, when)[name] for each in observed] for when in ("before", "after"))
        changes = [_relative(new - old, old) for old, new in zip(before, after, strict=True)]
        seen.append(Seen(name, placement_of(before, after, expected), changes))
    return seen


def placement_of(before: Sequence[Tensor], after: Sequence[Tensor], whole: Tensor) -> str:
    """Return how a tensor is placed on the ranks. `before` and `after` have one tensor per rank."""
    if before[0].shape == whole.shape:
        if all(_close(each, values[0]) for values in (before, after) for each in values):
            return REPLICATE if _close(before[0], whole) else UNKNOWN
        return PARTIAL if _close(sum(before), whole) else UNKNOWN
    for dim in range(whole.dim()):
        if before[0].shape[dim] * len(before) != whole.shape[dim]:
            continue
        if _close(torch.cat(list(before), dim), whole):
            return f"Shard({dim})"
        if _is_strided(before, whole, dim):
            return f"Shard({dim}), strided"
    return UNKNOWN


def _is_strided(shards: Sequence[Tensor], whole: Tensor, dim: int) -> bool:
    """Tell whether each rank has its part of several blocks, such as its heads of the queries, keys and values."""
    length = shards[0].shape[dim]
    for blocks in range(2, length + 1):
        if length % blocks == 0:
            parts = [shard.unflatten(dim, (blocks, length // blocks)) for shard in shards]
            if _close(torch.cat(parts, dim + 1).flatten(dim, dim + 1), whole):
                return True
    return False


def still_partial(seen: Sequence[Seen]) -> list[str]:
    """Return the names of the gradients that still have to be added up over the ranks."""
    return [each.name for each in seen if each.is_gradient and each.placement == PARTIAL]


def _close(values: Tensor, expected: Tensor) -> bool:
    return values.shape == expected.shape and _relative(values - expected, expected) < 1e-4


def _relative(difference: Tensor, of: Tensor) -> float:
    norm, size = difference.norm().item(), of.norm().item()
    return norm / size if size else norm
