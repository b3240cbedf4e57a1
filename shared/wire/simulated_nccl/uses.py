"""Shows the simulation which tensors a rank uses: in operators, in reads by the host, and by freeing their memory."""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

# With these, the host reads a tensor's values without an operator.
_HOST_READS = {
    *("__array__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "numpy", "tolist")
}


@contextlib.contextmanager
def shown_to(simulation):
    """Show the simulation what this thread uses inside the block, including the backward passes that it starts."""
    with _HostReads(simulation), _Operators(simulation), _storages_watched(simulation):
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, simulation):
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor then calls operators on its local tensor, and those are shown
        options = options or {}
        if self._simulation.flights and _uses_values(operator):
            for declared, given in _given(operator._schema, arguments, options):
                alias = declared.alias_info
                if alias is None or alias.is_write:  # otherwise the operator makes a view, which uses no values
                    for tensor in _tensors(given):
                        self._simulation.use(tensor, writes=alias is not None)
        return operator(*arguments, **options)


def _uses_values(operator) -> bool:
    """Return False for operators that only wait or read a shape, and for collectives, which `launch()` sees."""
    name = operator._schema.name.split("::")[1]
    return not (
        operator.namespace == "c10d"
        or name in ("wait_tensor", "_wrap_tensor_autograd")  # the latter only wraps the result of a collective
        or name.startswith("new_")
        or name.endswith("_like")
    )


def _given(schema, arguments, options):
    """Yield each argument of an operator's schema with the value that was passed for it."""
    for index, declared in enumerate(schema.arguments):
        if index < len(arguments):
            yield declared, arguments[index]
        elif declared.name in options:
            yield declared, options[declared.name]


def _tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _HostReads(TorchFunctionMode):
    def __init__(self, simulation):
        super().__init__()
        self._simulation = simulation

    def __torch_function__(self, function, types, arguments=(), options=None):
        if self._simulation.flights and getattr(function, "__name__", "") in _HOST_READS:
            for tensor in _tensors(arguments):
                self._simulation.use(getattr(tensor, "_local_tensor", tensor), writes=False)  # of a DTensor
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def _storages_watched(simulation):
    resize = torch.UntypedStorage.resize_

    def show_and_resize(storage, size):
        if size != storage.nbytes():
            simulation.free(storage)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = show_and_resize  # pyright: ignore[reportAttributeAccessIssue] (a patch)
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize
