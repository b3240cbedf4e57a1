"""What tensors may look like: parameters and buffers when they are wrapped, and gradients when they are complete.

Their names are for error messages, because an optimizer or a bucket gets parameters without them. Only `contiguous`
looks at values. It copies a tensor if it has to; the others read shapes, strides and addresses.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Named = TypeVar("Named", bound=torch.Tensor)
_names = WeakIdKeyDictionary()  # of the parameters that have been in a wrapped module


def remember_names(parameters: dict[str, nn.Parameter]) -> None:
    """Remember the names that parameters have in a module."""
    for name, parameter in parameters.items():
        _names[parameter] = name


def name_of(parameter: nn.Parameter | None) -> str:
    """Describe a parameter by its name, or by its shape if no module with it has been wrapped."""
    if parameter in _names:
        return f"parameter {_names[parameter]!r}"
    return f"a parameter of shape {list(getattr(parameter, 'shape', []))}"


def numbered(parameters: Iterable[Named], taken: Collection[str] = ()) -> dict[str, Named]:
    """Name parameters that an optimizer gets without their module, if necessary by index and shape."""
    named = {}
    for index, parameter in enumerate(parameters, len(taken)):
        name = _names.get(parameter)
        if name is None or name in named or name in taken:
            name = f"#{index} of shape {list(parameter.shape)}"
        named[name] = parameter
    return named


NOT_SENT_BY_GLOO = {"int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"}


@contextlib.contextmanager
def contiguous(tensor: torch.Tensor):
    """Yield a tensor's values without gaps in memory, for a collective that fills them, and put the result back.

    A collective sends memory, not values: of a slice or a transposed tensor, gloo would send other elements. A tensor
    without gaps is yielded itself.
    """
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # expanded: the same memory for every index
            tensor = tensor.narrow(dim, 0, 1)
    packed = tensor.contiguous().resolve_conj().resolve_neg()
    is_rare = str(packed.dtype).removeprefix("torch.") in NOT_SENT_BY_GLOO
    yield packed.view(-1).view(torch.uint8) if is_rare else packed
    if packed.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.copy_(packed)


def reject_unusual(name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError for a parameter or buffer that no wrapper can broadcast or train."""
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run one forward of the lazy module before you wrap it")
    if hasattr(tensor, "device_mesh"):
        raise ValueError(f"{name!r} is a DTensor, which is distributed already: wrap a plain module")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name!r} is {tensor.layout} in {tensor.dtype}, which cannot be broadcast: make it dense first"
        )
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.requires_grad and is_expanded:
        raise ValueError(f"parameter {name!r} is an expanded tensor, which no optimizer can update: clone() it first")


def reject_meta(tensors: dict[str, torch.Tensor]) -> None:
    """Raise a ValueError for a tensor without values. It is on the meta device on every rank, so none of them waits."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, and has no values: call to_empty() and initialize it before you wrap "
                "the module, or use ZeRO3 with a Materializer"
            )


def descriptions_of(tensors: dict[str, torch.Tensor]) -> tuple[list[str], ValueError | None]:
    """Describe each tensor in one line. Returns the lines, and an error if no wrapper can train one of the tensors."""
    lines, error = [], None
    for name, tensor in tensors.items():
        kind = "trained" if tensor.requires_grad else "frozen"
        try:
            reject_unusual(name, tensor)
            lines.append(f"{name}: {list(tensor.shape)} in {tensor.dtype}, {kind}")
        except ValueError as unusual:
            lines.append(str(unusual))
            error = error or unusual
    return lines or ["no parameters"], error


def reject_shared_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError if two tensors share memory, which their shards or copies would no longer do."""
    spans = []
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
            continue  # Others say what is wrong with it.
        if tensor.numel() and not tensor.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), name, tensor.requires_grad))
    for (_, end, name, is_trained), (begin, _, other, other_is_trained) in pairwise(sorted(spans)):
        if begin < end and (is_trained or other_is_trained):
            raise ValueError(
                f"{name!r} and {other!r} share memory, but ranks would store them separately: "
                "use the same nn.Parameter in both places, or clone() one of them"
            )


def reject_split(parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if ranks of a group have different shards of a parameter, which a wrapper would make equal."""
    ranks = {*dist.get_process_group_ranks(group or dist.group.WORLD)}
    for name, parameter in parameters.items():
        split_over = ranks & getattr(getattr(parameter, "part", None), "ranks", frozenset())
        if len(split_over) > 1:
            raise ValueError(
                f"{name!r} is split over ranks {sorted(split_over)}, which would overwrite each other's shards: "
                "pass group=, with the ranks that have the same shard"
            )


def reject_gradient(parameter: nn.Parameter) -> None:
    """Raise a RuntimeError for a gradient that a flat tensor cannot hold."""
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"{name_of(parameter)} has a sparse gradient, but buckets and flat tensors are dense: "
            "build its embedding with sparse=False"
        )
    if gradient.requires_grad:
        raise RuntimeError(
            f"{name_of(parameter)} has a gradient that is part of a graph, but collectives do not record one: "
            "backward(create_graph=True) is not supported; call the module itself instead of its wrapper"
        )
