"""Operations in flight: the memory that they use, the copies on which gloo works, and which tensors the rank uses.

The simulation is shown what a rank uses in operators, in reads by the host, and by freeing its memory.
"""

import contextlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from shared.wire import completion, frames

# -- the Work that simulated NCCL returns


_kept: deque = deque(maxlen=10_000)  # C++ keeps a Work alive, but not the attributes that Python adds to it


class SimulatedWork(dist.Work):
    """What NCCL returns for an operation in flight. Waiting for it does not block the host."""

    def __init__(self, simulation, flight):
        super().__init__()
        self._simulation, self.flight = simulation, flight
        _kept.append(self)

    def wait(self, timeout=None) -> bool:
        with completion.timed(self) if self.flight.call.is_async else contextlib.nullcontext():
            self._simulation.wait(self.flight)
        return True

    synchronize = block_current_stream = wait  # pyright: ignore[reportAssignmentType] (torch's stub returns None)

    def is_completed(self) -> bool:
        """Return whether the operation is complete. If so, the host may rely on that, and need not call wait()."""
        gloo_work = self.flight.work
        is_complete = gloo_work is None or gloo_work.is_completed()
        if is_complete:
            self._simulation.wait(self.flight)
        return is_complete

    def get_future(self) -> torch.futures.Future:
        """Return a future whose value, the outputs, can be used without a wait.

        Raises:
            RuntimeError: For gloo's send, receive and reduce-scatter, which have no future.
        """

        def land(done: torch.futures.Future) -> list[torch.Tensor]:
            # Waits for the future, because gloo's Work is complete only after this callback.
            self._simulation.complete(self.flight, done.wait)
            self.flight.waited = True
            return self.flight.outputs

        if self.flight.work is None:
            raise RuntimeError("the operation is already complete, so simulated NCCL no longer has its future")
        return self.flight.work.get_future().then(land)


CURRENT_STREAM = "current"  # the stream on which a rank computes
_GARBAGE = 0x55


class Flight:
    """An operation in flight.

    Attributes:
        stream: The stream on which NCCL would run it. Operations on one stream run in order.
        waited: Whether the current stream waits for it.
        landed: Whether it is complete, with its results in the caller's tensors.
        work: gloo's Work, on the copies, until it is complete.
    """

    def __init__(self, call, stream: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]):
        self.call, self.stream = call, stream
        self.waited, self.landed = stream == CURRENT_STREAM, False
        self.work: dist.Work | None = None
        self._copies = {id(tensor): tensor.detach().clone() for tensor in (*outputs, *inputs)}
        self._originals = {id(self._copies[id(tensor)]): tensor for tensor in (*outputs, *inputs)}
        self._results = [self._copies[id(tensor)] for tensor in outputs]
        # Other tensors on the same memory, because `parameter.data = …` may give the caller's tensors other memory.
        self.outputs = [tensor.data for tensor in outputs]
        self._inputs = [tensor.data for tensor in inputs]

    @property
    def origin(self) -> str:
        """End a message with the line of the student's code that launched the operation, if there is one."""
        return f". It was launched at {frames.where(*self.call.called_from)}" if self.call.called_from else ""

    @property
    def copies(self) -> list[torch.Tensor]:
        return list(self._copies.values())

    def with_copies(self, arguments: dict) -> dict:
        """Return an operator's arguments, with the copies in place of the tensors."""
        return tree_map_only(torch.Tensor, lambda tensor: self._copies[id(tensor)], arguments)

    def with_originals(self, result):
        """Return an operator's result, with the caller's tensors in place of the copies."""
        return tree_map_only(torch.Tensor, lambda tensor: self._originals.get(id(tensor), tensor), result)

    def fill_outputs_with_garbage(self) -> None:
        with torch.inference_mode(), _disable_current_modes():
            for tensor in self.outputs:
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(float("nan"))
                elif tensor.numel():
                    _bytes_of(tensor).fill_(_GARBAGE)

    def put_results(self) -> None:
        """Copy the results into the outputs, unless they have landed in the meantime."""
        if self.landed:
            return
        with torch.inference_mode(), _disable_current_modes():
            for tensor, result in zip(self.outputs, self._results, strict=True):
                tensor.copy_(result)

    def land(self) -> None:
        """Note that the operation is complete. Its own Work may exist for much longer than its copies are needed."""
        self.landed = True
        self.work, self._copies, self._originals, self._results = None, {}, {}, []

    def forget_tensors(self) -> None:
        """Forget the caller's tensors, once the current stream has waited and nothing can go wrong anymore."""
        self.outputs, self._inputs = [], []

    # -- its memory

    def conflict_with(self, tensor: torch.Tensor, writes: bool) -> str:
        """Return "output" or "input" for memory that must not be used like this in flight, "" for other memory."""
        if any(overlap(output, tensor) for output in self.outputs):
            return "output"
        return "input" if writes and any(overlap(each, tensor) for each in self._inputs) else ""

    def use_of(self, storage: torch.UntypedStorage) -> str:
        """Return "output" or "input" if the operation uses a storage, "" otherwise."""
        for kind, tensors in (("output", self.outputs), ("input", self._inputs)):
            if any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors):
                return kind
        return ""


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory and the one after its last; equal ones if it has no memory."""
    is_wrapper = isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
    if is_wrapper or tensor.layout is not torch.strided or tensor.is_meta:
        return 0, 0
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:
        return 0, 0
    first = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
    reach = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return first, first + (reach + 1) * tensor.element_size()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor of any dtype as bytes."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    empty: Any = torch.empty(0, dtype=torch.uint8)  # torch's stub of set_() knows no such storage
    return empty.set_(tensor.untyped_storage(), begin, (tensor.nbytes,))


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
