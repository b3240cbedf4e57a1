"""Ranks that share samples, or shards of a sequence: what they must agree on."""

import contextlib
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.guards.alarms import Alarm

_SAME_BATCH = (
    "These ranks share each sample, so give all of them the same batch, for example with a sampler for replicas only"
)
_SAME_SEED = (
    "These ranks hold the same activations, so they must drop the same ones: call torch.manual_seed() with the same "
    "number on all of them"
)
_SAME_SHAPES = "Cut all sequences to one length, or pad them, and give every rank an equal shard"
_SAME_ATTENTION = f"{_SAME_SHAPES}, in the same dtype, with the same options, and with gradients on all ranks or none"


def expect_divisible(length: int, parts: int, what: str) -> None:
    """Raise a ValueError if something cannot be cut into equal parts."""
    if length % parts:
        raise ValueError(f"cannot split {what} evenly: {length} is not divisible by {parts}")


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which matmuls compute in the dtype of what they get."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext()


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def expect_same_first_batch(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError on every rank if they call a model for the first time, but not with the same batch.

    Ranks that share a sequence or a layer need the same batch. A sampler that gives each rank other samples, as data
    parallelism needs it, would train something without an error.

    Communication: in the first call, one all-gather of two integers, which the ledger does not see.
    """

    def compare(_model: nn.Module, inputs: tuple, named: dict) -> None:
        handle.remove()
        tensors = [tensor for tensor in (*inputs, *named.values()) if isinstance(tensor, Tensor) and not tensor.is_meta]
        if tensors and not torch.compiler.is_compiling():
            checksums = [zlib.crc32(bytes_of(tensor)) for tensor in tensors]
            lines = [f"{list(t.shape)} with checksum {c:08x}" for t, c in zip(tensors, checksums, strict=True)]
            device = tensors[0].device
            Alarm(group).compare(lines, device, "batches", _SAME_BATCH)
            if not getattr(model, "sequence_parallel", True):
                _expect_same_masks(model, group, device)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def _expect_same_masks(model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise a ValueError on every rank if dropout layers begin with other random numbers, so with other masks.

    Communication: in the first call that trains dropout layers, one all-gather of two integers, which the ledger does
    not see.
    """
    kind = nn.modules.dropout._DropoutNd
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kind) and layer.p}

    def compare(*_) -> None:
        if drawing := [name for name, layer in layers.items() if layer.training]:
            handle.remove()
            checksum = zlib.crc32(bytes_of(_random_state(device)))
            Alarm(group).compare([f"{drawing[0]} with random state {checksum:08x}"], device, "masks", _SAME_SEED)

    if layers:
        handle = model.register_forward_pre_hook(compare)
        compare()  # torch has already listed the hooks of the forward that has begun


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def expect_equal_shards(named: dict[str, Tensor], group: dist.ProcessGroup | None, dim: int, chunks: int) -> None:
    """Raise a ValueError on every rank if their shards of a sequence cannot be used together.

    All ranks compare first, so that one rank does not raise while the others wait for it.

    Args:
        named: This rank's tensors.
        group: The ranks that share the sequence.
        dim: The dimension of the sequence.
        chunks: How many equal chunks a shard consists of.

    Communication: one all-gather of two integers, which the ledger does not see.
    """
    first = next(iter(named.values()))
    Alarm(group).compare(_described(named), first.device, "shards of a sequence", _SAME_SHAPES)
    if not -first.dim() <= dim < first.dim():
        raise ValueError(f"dimension {dim} cannot be that of the sequence: a shard has {first.dim()} dimensions")
    expect_divisible(first.shape[dim], chunks, "a shard of the sequence into chunks")


def expect_attention_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    chunks: int = 1,
    heads_divide: bool = False,
    **options: object,
) -> None:
    """Raise a ValueError on every rank if their queries, keys and values [B, H, T, D] cannot be used together.

    A rank whose tensors need no gradients would not take part in backward. So the ranks compare that, too.

    Args:
        chunks: How many equal chunks a shard of the sequence consists of.
        heads_divide: Whether the number of ranks must divide the heads.
        options: What else must be the same on all ranks.

    Communication: one all-gather of two integers, which the ledger does not see.
    """
    described = _described({"q": q, "k": k, "v": v})
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (q, k, v)]
    lines = [line + " with gradients" * needed for line, needed in zip(described, needs, strict=True)]
    lines += [f"{name}={value}" for name, value in options.items()]
    Alarm(group).compare(lines, q.device, "shards of a sequence", _SAME_ATTENTION)
    if any((other.shape, other.dtype) != (q.shape, q.dtype) for other in (k, v)):
        raise ValueError(f"q, k and v must have the same shape and dtype, got {', '.join(described)}")
    if q.dim() != 4 or not q.is_floating_point():
        raise ValueError(f"attention needs floating-point tensors [B, H, T, D], got {described[0]}")
    expect_divisible(q.shape[2], chunks, "a shard of the sequence into chunks")
    if heads_divide:
        expect_divisible(q.shape[1], dist.get_world_size(group), "the heads over the ranks")


def _described(named: dict[str, Tensor]) -> list[str]:
    return [f"{name}: {list(t.shape)} in {str(t.dtype).removeprefix('torch.')}" for name, t in named.items()]
