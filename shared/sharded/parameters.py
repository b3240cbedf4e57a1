"""Parameters of a sharded model: which ones can be sharded, and what must not happen to them afterwards."""

from collections.abc import Iterable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from shared.guards import calls
from shared.guards.alarms import Alarm
from shared.guards.tensors import contiguous, descriptions_of, reject_meta, reject_split
from shared.guards.wrappers import reject_joint
from shared.sharded.parts import mark

SAME_CALLS = (
    "let all ranks call the same units in the same order, and forward(), backward() and finish_gradient_sync() equally "
    "often, also for a batch that one of them skips, and look for an error of another rank"
)


class ReshardedParameter(nn.Parameter):
    """The class of a parameter while its memory is freed. Whatever needs its values raises a RuntimeError.

    Without it, some operations would read freed memory, and end the process. Changing a tensor's class is how torch's
    own UninitializedParameter becomes a Parameter.
    """

    # What may be used nevertheless, because it needs no values.
    attributes = frozenset(
        {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad", "grad_fn"}
        | {"is_leaf", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "nbytes", "itemsize"}
        | {"_version", "_backward_hooks", "_post_accumulate_grad_hooks"}
    )
    methods = frozenset(
        {"size", "dim", "numel", "stride", "element_size", "storage_offset", "is_contiguous"}
        | {"is_floating_point", "is_complex", "data_ptr", "untyped_storage", "requires_grad_"}
        | {"register_hook", "register_post_accumulate_grad_hook"}
        | {"new_zeros", "new_empty", "zeros_like", "empty_like"}
    )
    shape_of_other = frozenset({"view_as", "reshape_as", "expand_as"})  # other.view_as(parameter) reads no values
    advice = (
        "it is sharded, and has memory only while forward() or backward() of its unit runs. Read it with "
        "full_state_dict() and set it with load_full_state_dict(), or change the model before you wrap it"
    )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        is_attribute = type(function).__name__ == "method-wrapper"  # such as Tensor.shape.__get__
        name = function.__self__.__name__ if is_attribute else function.__name__
        if name == "grad" and function.__name__ == "__set__":
            raise RuntimeError(
                f"setting the gradient of {describe(args[0])} changes nothing, because its shards have the gradients: "
                "use zero_grad() of the ZeRO3 model, or the gradients of its parameters()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name == "detach" or (name == "data" and function.__name__ == "__get__"):
                alias = function(*args).as_subclass(cls)  # it has no memory either
                alias.name_in_model = getattr(args[0], "name_in_model", None)
                return alias
            takes_shape_only = name in cls.shape_of_other and not isinstance(args[0], cls)
            if takes_shape_only or name in (cls.attributes if is_attribute else cls.methods):
                return function(*args, **(kwargs or {}))
        freed = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, cls))
        if TracingContext.try_get() is not None:
            raise RuntimeError(
                f"torch.compile() is not supported for a sharded model, here one with {describe(freed)}, because it "
                "would trace parameters that have no memory: train it without, or compile an unsharded model"
            )
        raise RuntimeError(f"cannot use {describe(freed)} in {name}: {cls.advice}")

    def __repr__(self):
        return f"{describe(self)}, which is sharded"

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"cannot save {describe(self)}: {self.advice}")

    def __deepcopy__(self, memo):
        raise RuntimeError(f"cannot copy {describe(self)}: {self.advice}")


def forbid_reads(parameters: Iterable[nn.Parameter]) -> None:
    """Let whatever needs the values of these parameters raise a RuntimeError, because their memory is freed now.

    Raises:
        RuntimeError: if one of them was changed since allow_reads(), because that would be lost.
    """
    for parameter in parameters:
        if parameter._version != getattr(parameter, "version_before_reads", parameter._version):
            raise RuntimeError(
                f"{describe(parameter)} was changed in place, for example in forward() or by nn.Embedding(max_norm=…), "
                "but this change would be lost, because it is not in the shard: change the values between steps, with "
                "full_state_dict() and load_full_state_dict()"
            )
        if parameter.numel():
            parameter.__class__ = ReshardedParameter


def allow_reads(parameters: Iterable[nn.Parameter]) -> None:
    """Make these parameters plain ones again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
        parameter.version_before_reads = parameter._version  # pyright: ignore[reportAttributeAccessIssue] (an attribute of its own)


def describe(parameter: nn.Parameter) -> str:
    """Name a parameter in an error message."""
    name = getattr(parameter, "name_in_model", None)
    return f"the parameter {name!r}" if name else f"a parameter of shape {list(parameter.shape)}"


def expect_shardable(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
    """Raise a ValueError that names a parameter, buffer or layer which cannot be sharded, or differs between ranks.

    Args:
        device: where the ranks communicate; by default, where the module's tensors are.

    Communication: one all-gather of two integers, which the ledger does not see.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if device is None:
        if Alarm(group).store is not None:  # A dry run needs no values.
            reject_meta(tensors)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    Alarm(group).compare(descriptions_of(tensors)[0], device)
    reject_split(dict(module.named_parameters()), group)
    reject_joint(module, group)
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ValueError(
                f"the layer {path!r} has sparse gradients, which cannot be sharded: build it with sparse=False"
            )
    averaged = {each for guard in calls.guards if guard.has_hooks for each in guard.ids}
    for name, parameter in module.named_parameters():
        if id(parameter) in averaged:
            raise ValueError(f"the parameter {name!r} is averaged by another wrapper already: wrap a model only once")
        _expect_shardable_parameter(name, parameter)
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise ValueError(f"the buffer {name!r} requires a gradient, which would not be averaged: detach() it")
    _expect_own_memory(tensors)


def _expect_shardable_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, ReshardedParameter):
        raise ValueError(f"{describe(parameter)} is sharded already: wrap a model only once")
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"the parameter {name!r} is uninitialized: run a forward before you wrap the model")
    if type(parameter) is not nn.Parameter:
        raise ValueError(
            f"the parameter {name!r} is a {type(parameter).__name__}, and would become a plain nn.Parameter: "
            "replace it before you wrap the model"
        )
    if parameter.grad is not None:
        raise ValueError(f"the parameter {name!r} has a gradient already: call zero_grad() before you wrap the model")
    if parameter.layout is not torch.strided:
        raise ValueError(f"the parameter {name!r} is sparse, and cannot be sharded: replace it with a dense one")
    if parameter.requires_grad and any(
        length > 1 and stride == 0 for length, stride in zip(parameter.shape, parameter.stride(), strict=True)
    ):
        raise ValueError(f"elements of the parameter {name!r} share memory: replace it with a copy, .clone()")


def _expect_own_memory(tensors: dict[str, torch.Tensor]) -> None:
    """Raise a ValueError if a trained parameter shares memory with another tensor."""
    named = [(*_memory_of(tensor), name) for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta]
    for (storage, _, end, one), (another, begin, _, other) in pairwise(sorted(memory for memory in named if memory[0])):
        is_trained = tensors[one].requires_grad or tensors[other].requires_grad
        if storage == another and begin <= end and is_trained:
            raise ValueError(
                f"{one!r} and {other!r} share memory, but are different tensors, and would be sharded apart: "
                "tie them by using one nn.Parameter in both places, or give one of them a copy"
            )


def _memory_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and the first and the last byte that the tensor uses there."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = int(sum((length - 1) * stride for length, stride in steps)) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, begin + span


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every rank the buffers of the group's first rank, whatever their memory layout.

    Communication: one broadcast per buffer.
    """
    for buffer in module.buffers():
        with contiguous(buffer) as packed:
            dist.broadcast(packed, group=group, group_src=0)


class UnchangedParameters:
    """Notices a parameter that was frozen, unfrozen, replaced, moved, removed or added after the model was sharded.

    Torch's tools notice if they are used with the model's own parameters instead of its shards.
    """

    def __init__(self, module: nn.Module, flat_parameters: Iterable):
        flat_parameters = list(flat_parameters)
        flat_of = {p: flat for flat in flat_parameters for p in flat.layout.parameters}
        self.module = module
        self.before = {name: (parameter, flat_of[parameter]) for name, parameter in self._named_now()}
        for name, (parameter, _) in reversed(self.before.items()):
            # For error messages. Of a tied one, it is the first name.
            parameter.name_in_model = name  # pyright: ignore[reportAttributeAccessIssue] (an attribute of its own)
        mark(
            flat_of,
            instead_of_step="build it after wrapping, with the parameters() of the ZeRO3 model, which are its shards",
            instead_of_clipping="call clip_grad_norm_() of the ZeRO3 model",
        )
        shards = [flat.shard for flat in flat_parameters]
        for flat, shard in zip(flat_parameters, shards, strict=True):
            mark([shard], is_split=True, holds=_contents_of(flat.layout))
        module.zero_grad = partial(_zero_gradients, [*flat_of, *shards])

    def _named_now(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(remove_duplicate=False)

    def check(self) -> None:
        """Raise a RuntimeError that names a parameter which is not what it was."""
        now = dict(self._named_now())
        with torch._C.DisableTorchFunctionSubclass():
            for name, (parameter, flat) in self.before.items():
                if change := _change_of(now.pop(name, None), parameter, flat):
                    raise RuntimeError(
                        f"the parameter {name!r} {change} after the model was sharded, so its shards would no longer "
                        "train it: change the model first, and wrap it again. full_state_dict() has its values"
                    )
        for name in now:
            raise RuntimeError(
                f"the parameter {name!r} was added after the model was sharded, so no shard would train it: "
                "change the model first, and wrap it again"
            )


def _contents_of(layout) -> str:
    """Say which shard a rank has of a flat parameter, and of which parameters that one consists."""
    names = ", ".join(f"{each.name_in_model} {list(each.shape)}" for each in layout.parameters)
    return f"shard {dist.get_rank(layout.group)} of {dist.get_world_size(layout.group)} of {names}"


def _zero_gradients(parameters: list[nn.Parameter], set_to_none: bool = True) -> None:
    """Do what zero_grad() does, for a module whose gradients belong to shards."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _change_of(now: nn.Parameter | None, parameter: nn.Parameter, flat) -> str:
    """Say what has happened to a parameter of a flat parameter, or return an empty string."""
    if now is not parameter:
        return "was replaced or removed"
    if parameter.requires_grad != flat.shard.requires_grad:
        return "was unfrozen" if parameter.requires_grad else "was frozen"
    if parameter.untyped_storage()._cdata != flat.flat_param.untyped_storage()._cdata:
        return "got other memory (by assigning .data, or by .to())"
    return ""
