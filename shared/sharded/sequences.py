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
_SAME_SHAPES = "Cut all sequences to one length, or pad them, and give every rank an equal shard"


def expect_divisible(length: int, parts: int, what: str) -> None:
    """Raise a ValueError if something cannot be cut into equal parts."""
    if length % parts:
        raise ValueError(f"cannot split {what} evenly: {length} is not divisible by {parts}")


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which matmuls compute in the dtype of what they get."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext()


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
            checksums = [zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes()) for tensor in tensors]
            lines = [f"{list(t.shape)} with checksum {c:08x}" for t, c in zip(tensors, checksums, strict=True)]
            Alarm(group).compare(lines, tensors[0].device, "batches", _SAME_BATCH)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def expect_equal_shards(
    named: dict[str, Tensor], group: dist.ProcessGroup | None, dim: int, chunks: int, heads_divide: bool = False
) -> None:
    """Raise a ValueError on every rank if their shards of a sequence cannot be used together.

    All ranks compare first, so that one rank does not raise while the others wait for it.

    Args:
        named: This rank's tensors, which must have one shape and one dtype.
        group: The ranks that share the sequence.
        dim: The dimension of the sequence.
        chunks: How many equal chunks a shard consists of.
        heads_divide: Whether the number of ranks must divide dimension 1, that of the heads.

    Communication: one all-gather of two integers, which the ledger does not see.
    """
    first, *others = named.values()
    lines = [f"{name}: {list(t.shape)} in {str(t.dtype).removeprefix('torch.')}" for name, t in named.items()]
    Alarm(group).compare(lines, first.device, "shards of a sequence", _SAME_SHAPES)
    if any((other.shape, other.dtype) != (first.shape, first.dtype) for other in others):
        raise ValueError(f"all tensors must have the same shape and dtype, got {', '.join(lines)}")
    expect_divisible(first.shape[dim], chunks, "a shard of the sequence into chunks")
    if heads_divide:
        expect_divisible(first.shape[1], dist.get_world_size(group), "the heads over the ranks")
