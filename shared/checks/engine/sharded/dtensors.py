"""Read the DTensors that torch's fully_shard creates, of which each rank holds a shard."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong

_ROUNDED_TO_FLOAT32 = 2e-6  # of the largest element; an average over the wrong ranks has a larger error


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one rank holds."""

    local: torch.Tensor
    dim: int | None  # the dimension along which the tensor is split; None if it is not a DTensor


def shard_of(tensor: torch.Tensor | None) -> LocalShard | None:
    if tensor is None:
        return None
    split = [each.dim for each in getattr(tensor, "placements", ()) if isinstance(each, Shard)]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return LocalShard(local.detach().cpu().clone(), split[0] if split else None)


def shards_of(module: nn.Module) -> dict[str, LocalShard | None]:
    """Return what this rank holds of a module's parameters and buffers, by name."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: shard_of(tensor) for name, tensor in named}


def assembled(shards: list[dict], copies: int = 1) -> list[dict]:
    """Concatenate the ranks' shards in the kernel, without communication. Returns each rank's tensors by name."""
    shard_ranks, tensors = len(shards) // copies, []
    for first in range(0, len(shards), shard_ranks):
        group = shards[first : first + shard_ranks]
        for own in group:
            tensors.append({name: _whole(shard, [each[name] for each in group]) for name, shard in own.items()})
    return tensors


def _whole(own: LocalShard | None, shards: list[LocalShard | None]) -> torch.Tensor | None:
    locals_ = [each.local for each in shards if each is not None]
    if own is None or own.dim is None or len(locals_) < len(shards):
        return own and own.local
    return torch.cat(locals_, own.dim)


def loss_of(module: nn.Module, x, y) -> torch.Tensor:
    """Compute a loss in y's dtype, whatever dtype the module computes in."""
    return (module(x).to(y.dtype) - y).square().mean()


def judge_tensors(found: list[dict], reference: dict, context: str, tolerance: float) -> None:
    """Compare tensors by name, rank by rank.

    Raises:
        Wrong: If a rank's tensor has other values or another dtype.
    """
    for rank, tensors in enumerate(found):
        for name, expected in reference.items():
            found_tensor = tensors[name]
            if found_tensor is None and expected is None:
                continue
            if found_tensor is None or expected is None:
                actual, wanted = ("None", "a tensor") if found_tensor is None else ("a tensor", "None")
                hint = "Hint: which parameters require gradients before your code runs, and which ones after it?"
                raise Wrong({rank: f"{context}{name} is {actual}; expected {wanted}"}, hint)
            if found_tensor.dtype != expected.dtype:
                hint = "Hint: in which dtype are shards stored, and in which dtype do ranks compute?"
                raise Wrong({rank: f"{context}{name} is {found_tensor.dtype}, expected {expected.dtype}"}, hint)
            if not nearly_equal(found_tensor, expected, tolerance):
                hint = "Hint: whose parameters are trained, and between which ranks are gradients averaged?"
                if (found_tensor - expected).abs().max() <= _ROUNDED_TO_FLOAT32 * expected.abs().max():
                    hint = "Hint: in which dtype are gradients added up if none is specified?"
                raise Wrong({rank: f"{context}{name}, {first_difference(found_tensor, expected, tolerance)}"}, hint)
