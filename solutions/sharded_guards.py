# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""Guards of a sharded model: what cannot be sharded, and what must not change afterwards, raises an error."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from solutions.units import ReshardedParameter, ShardedFlatParameter, describe


def memory_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and the first and the last byte that the tensor uses there."""
    begin = tensor.storage_offset() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((length - 1) * stride for length, stride in steps) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, begin + span


def expect_shardable(module: nn.Module) -> None:
    """Raise a ValueError that names a parameter or layer which cannot be sharded."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ValueError(
                f"the layer {path!r} has sparse gradients, which cannot be sharded: build it with sparse=False"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ReshardedParameter):
            raise ValueError(f"{describe(parameter)} is sharded already: wrap a model only once")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"the parameter {name!r} is uninitialized: run a forward before you wrap the model")
        if parameter.layout is not torch.strided:
            raise ValueError(f"the parameter {name!r} is sparse, and cannot be sharded: replace it with a dense one")
        if parameter.requires_grad and any(
            length > 1 and stride == 0 for length, stride in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise ValueError(f"elements of the parameter {name!r} share memory: replace it with a copy, .clone()")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    places = [(*memory_of(tensor), name, tensor) for name, tensor in tensors if tensor.numel() and not tensor.is_meta]
    places = sorted((place for place in places if place[0]), key=lambda place: place[:3])
    for one, other in pairwise(places):
        is_trained = one[-1].requires_grad or other[-1].requires_grad
        if one[0] == other[0] and other[1] <= one[2] and is_trained:
            raise ValueError(
                f"{one[-2]!r} and {other[-2]!r} share memory, but are different tensors, and would be sharded apart: "
                "tie them by using one nn.Parameter in both places, or give one of them a copy"
            )


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every rank the buffers of the group's first rank, whatever their memory layout.

    Communication: one broadcast per buffer.
    """
    for buffer in module.buffers():
        # An expanded dimension has one element in memory.
        own = buffer[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())]
        sent = own.contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not own:
            own.copy_(sent)


def tensors_in(value, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in a unit's output: in containers, dataclasses and other objects."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, str | bytes | int | float | nn.Module | type) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part, seen)


class UnchangedParameters:
    """Notices a parameter that was frozen, unfrozen, replaced, moved or added after the model was sharded."""

    def __init__(self, module: nn.Module, flat_parameters: Iterable[ShardedFlatParameter]):
        flat_of = {p: flat for flat in flat_parameters for p in flat.layout.parameters}
        self.places = []  # each layer that has a parameter, its name there and in the model, and its flat parameter
        for path, layer in module.named_modules():
            for key, parameter in layer.named_parameters(recurse=False):
                name = f"{path}.{key}" if path else key
                self.places.append((layer, key, name, parameter, flat_of[parameter]))
                if not hasattr(parameter, "name_in_model"):
                    parameter.name_in_model = name  # for error messages
        self.layers = [
            (path, layer, len(layer._parameters), len(layer._modules)) for path, layer in module.named_modules()
        ]

    def check(self) -> None:
        """Raise a RuntimeError that names a parameter which is not what it was."""
        with torch._C.DisableTorchFunctionSubclass():
            for layer, key, name, parameter, flat in self.places:
                change = None
                if layer._parameters.get(key) is not parameter:
                    change = "was replaced"
                elif parameter.requires_grad != flat.shard.requires_grad:
                    change = "was unfrozen" if parameter.requires_grad else "was frozen"
                elif parameter.untyped_storage()._cdata != flat.flat_param.untyped_storage()._cdata:
                    change = "got other memory (by assigning .data, or by .to())"
                if change:
                    raise RuntimeError(
                        f"the parameter {name!r} {change} after the model was sharded, so its shards would no longer "
                        "train it: change the model first, and wrap it again. full_state_dict() has its values"
                    )
        for path, layer, parameters, modules in self.layers:
            if len(layer._parameters) != parameters or len(layer._modules) != modules:
                raise RuntimeError(
                    f"a parameter or layer was added to or removed from {path or 'the model'!r} after the model was "
                    "sharded: change the model first, and wrap it again"
                )
