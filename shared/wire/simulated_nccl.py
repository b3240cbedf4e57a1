"""Simulates over gloo what NCCL's collectives do for the host, so that bugs that gloo hides become errors.

On a GPU, a collective only *launches* work on a stream. The host goes on at once, and the output holds garbage until
the current stream has waited for the collective. Code that forgets to wait, or that changes or frees a tensor in
flight, often passes on gloo and computes wrong values on NCCL. Here, such code raises NCCLViolation:

- A synchronous collective returns no Work, and returns before it is complete. An asynchronous one returns a Work whose
  `wait()` lets the host continue: only later operations on the output wait.
- gloo works on copies. Until the stream has waited, the outputs hold NaN, or bytes 0x55 in tensors of integers.
- To use an output before `wait()`, to write to an input in flight, or to free an output in flight is an error.
- The first unbatched send or receive between two ranks blocks until both have called one, because NCCL then builds a
  communicator for the pair. No signal interrupts this.
- After a cut, operations in flight end without an error, and their outputs keep the garbage.

The simulation has limits. Times mean nothing. There is one stream per rank. An operation whose future was taken counts
as waited for when it completes. Two unbatched operations between the same two ranks do not block each other, although
NCCL runs them one after the other. A read through a raw pointer is not seen.
"""

import contextlib
import os
import sys
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from shared.deadlines import scaled
from shared.wire import completion, frames

MEETING_TIMEOUT_S = scaled(15.0)
_GARBAGE = 0x55
_HOST_READS = ("__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "data_ptr", "numpy", "tolist")
_kept: deque = deque(maxlen=10_000)  # C++ keeps a Work alive, but not the attributes that Python adds to it


class NCCLViolation(RuntimeError):
    """Code that may pass on gloo, and computes wrong values or hangs on NCCL."""


class Flight:
    """An operation in flight: the caller's tensors, and the copies on which gloo works."""

    def __init__(self, call, outputs: list[torch.Tensor], inputs: list[torch.Tensor]):
        self.call, self.outputs, self.inputs = call, outputs, inputs
        self.copies = {id(tensor): tensor.detach().clone() for tensor in (*outputs, *inputs)}
        self.storage_bytes = [tensor.untyped_storage().nbytes() for tensor in outputs]
        self.work: dist.Work | None = None
        self.waited = not call.is_async
        self.future_taken = False

    @property
    def freed(self) -> bool:
        now = [tensor.untyped_storage().nbytes() for tensor in self.outputs]
        return any(has < had for has, had in zip(now, self.storage_bytes, strict=True))

    def put_results(self) -> None:
        """Copy the results into the outputs, unless those were freed after wait(), in the order of the stream."""
        if not self.freed:
            with _disable_current_modes():
                for tensor in self.outputs:
                    tensor.data.copy_(self.copies[id(tensor)])

    def forget_tensors(self) -> None:
        """Let go of all tensors once the operation is complete. Its Work may live on."""
        self.outputs, self.inputs, self.copies, self.storage_bytes = [], [], {}, []

    def __str__(self) -> str:
        return (
            f"{self.call}, launched at {frames.where(*self.call.called_from)}"
            if self.call.called_from
            else str(self.call)
        )


class Simulation:
    """All operations in flight of one rank, and the rules for its tensors."""

    def __init__(self):
        self.flights: list[Flight] = []
        self.is_cut = False
        self._met: set[str] = set()
        self._modes = contextlib.ExitStack()

    @property
    def copied_bytes(self) -> int:
        """The memory of the copies on which gloo works."""
        return sum(copy.nbytes for flight in self.flights for copy in flight.copies.values())

    def start(self) -> None:
        """Watch the operations of this thread, and of the backward passes that it starts."""
        self._modes.enter_context(_HostReads(self))
        self._modes.enter_context(_Operations(self))

    def stop(self) -> None:
        self._modes.close()

    def launch(self, call, operator, keyset, arguments: dict):
        """Launch an operation on copies of its tensors.

        Returns what the operator returns, and the operation's Work, or None for one that has blocked the host. The
        caller of a synchronous operation never sees that Work.

        Raises:
            NCCLViolation: if the operation uses a tensor that is in flight, or its partner never calls.
        """
        outputs, inputs = _outputs_and_inputs(call.op, arguments)
        for tensor in (*outputs, *inputs):
            if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                raise ValueError(f"Tensors must be contiguous: {call} got strides {tensor.stride()}")
            self._chain(call, tensor)
        for flight in [flight for flight in self.flights if flight.waited]:
            self.land(flight)  # on the GPU, the operation starts when the current stream comes to it
        if call.partner is not None and not _is_batched():
            self._meet(call)
        flight = Flight(call, outputs, inputs)
        on_copies = tree_map_only(torch.Tensor, lambda tensor: flight.copies[id(tensor)], arguments)
        result = operator.redispatch(keyset, **on_copies)
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        if boxed is None:
            return result, None  # a monitored barrier has no Work
        flight.work = dist.Work.unbox(boxed)
        for tensor in outputs:
            _fill_with_garbage(tensor)
        self.flights.append(flight)
        work = _SimulatedWork(self, flight)
        _kept.append(work)
        result = (*result[:-1], work.boxed()) if isinstance(result, (tuple, list)) else work.boxed()
        return result, work

    def _chain(self, call, tensor: torch.Tensor) -> None:
        """Let an operation start after those in flight on the same tensor, if they use the same communicator."""
        for flight in list(self.flights):
            if _overlaps(flight.outputs, tensor):
                if flight.call.group_name != call.group_name or None not in (flight.call.partner, call.partner):
                    self.use(tensor, writes=True)
                else:
                    self.land(flight)

    def _meet(self, call) -> None:
        """Wait until the partner, too, calls its first unbatched operation with this rank."""
        me, other = dist.get_rank(), call.partner
        low, high = sorted((me, other))
        pair = f"simulated NCCL/{call.group_name}/{low}-{high}"
        if pair in self._met:
            return
        self._met.add(pair)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{pair}/{me}", "here")
        try:
            store.wait([f"{pair}/{other}"], timedelta(seconds=MEETING_TIMEOUT_S))
        except dist.DistError:
            raise NCCLViolation(
                f"{call} waited {MEETING_TIMEOUT_S:g} s for rank {other} to call a send or receive with rank {me}, and "
                "on NCCL it would wait forever: an unbatched send or receive first builds a communicator for the two "
                "ranks. Put them into one dist.batch_isend_irecv(), or let the ranks take turns"
            ) from None

    def use(self, tensor: torch.Tensor, writes: bool) -> None:
        """Note that the current stream uses a tensor: finish what it has waited for, and reject the rest."""
        for flight in list(self.flights):
            if _overlaps(flight.outputs, tensor):
                if not flight.waited and not (flight.future_taken and flight.work.is_completed()):
                    what = "was written to" if writes else "was used"
                    raise NCCLViolation(f"the output of {flight} {what} before wait(): on NCCL it holds garbage")
                self.land(flight)
            elif writes and not flight.waited and _overlaps(flight.inputs, tensor):
                raise NCCLViolation(f"the input of {flight} was changed in flight, before wait()")

    def land(self, flight: Flight) -> None:
        """Wait until an operation is complete, and put its results into the caller's tensors."""
        if flight not in self.flights:
            return
        self.flights.remove(flight)
        try:
            with completion.landing(flight):
                completion.untimed_wait(flight.work)
        except RuntimeError:
            if not self.is_cut:
                raise
        else:
            flight.put_results()
        flight.forget_tensors()

    def synchronize(self) -> None:
        """Wait for everything that the current stream has waited for."""
        for flight in list(self.flights):
            if flight.waited:
                self.land(flight)


class _SimulatedWork(dist.Work):
    """What NCCL returns: waiting for it lets the host continue."""

    def __init__(self, simulation: Simulation, flight: Flight):
        super().__init__()
        self._simulation, self.flight = simulation, flight

    def wait(self, timeout=None) -> bool:
        flight = self.flight
        with completion.timed(self) if flight.call.is_async else contextlib.nullcontext():
            if flight.freed and not flight.waited:
                raise NCCLViolation(f"the output of {flight} was freed in flight, before wait()")
            flight.waited = True
            if flight.call.op == "barrier":  # the only wait that blocks the host
                self._simulation.land(flight)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return self.flight not in self._simulation.flights or self.flight.work.is_completed()

    def get_future(self) -> torch.futures.Future:
        flight = self.flight
        flight.future_taken = True

        def land(done: torch.futures.Future) -> list[torch.Tensor]:
            done.wait()  # not for the Work, which is complete only after this callback
            flight.put_results()
            outputs = flight.outputs
            if flight in self._simulation.flights:
                self._simulation.flights.remove(flight)
                flight.forget_tensors()
                completion.landed(flight)
            return outputs

        return flight.work.get_future().then(land)

    def _source_rank(self) -> int:
        return self.flight.work._source_rank()

    source_rank = _source_rank


class _Operations(TorchDispatchMode):
    """Shows every operation on tensors to the simulation."""

    def __init__(self, simulation: Simulation):
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        options = options or {}
        if self._simulation.flights and _uses_values(operator):
            for declared, given in _given(operator._schema, arguments, options):
                alias = declared.alias_info
                if alias is None or alias.is_write:  # otherwise it makes a view, which uses no values
                    for tensor in _local_tensors(given):
                        self._simulation.use(tensor, writes=alias is not None)
        return operator(*arguments, **options)


class _HostReads(TorchFunctionMode):
    """Finishes what the stream has waited for when the host reads a tensor, as a copy from a GPU would."""

    def __init__(self, simulation: Simulation):
        super().__init__()
        self._simulation = simulation

    def __torch_function__(self, function, types, arguments=(), options=None):
        if self._simulation.flights and getattr(function, "__name__", "") in _HOST_READS:
            for tensor in _local_tensors(arguments):
                self._simulation.use(tensor, writes=False)
        return function(*arguments, **(options or {}))


def _uses_values(operator) -> bool:
    """False for collectives, which have rules of their own, and for operators that only read a tensor's shape."""
    name = operator._schema.name.split("::")[1]
    is_collective = operator.namespace in ("c10d", "_c10d_functional")
    return not is_collective and not name.startswith("new_") and not name.endswith("_like")


def _given(schema, arguments, options):
    """Yield each argument of an operator's schema with what it was given."""
    for index, declared in enumerate(schema.arguments):
        if index < len(arguments):
            yield declared, arguments[index]
        elif declared.name in options:
            yield declared, options[declared.name]


def _local_tensors(value):
    """Yield the tensors in a value that have memory of their own: for a DTensor, the one that it wraps."""
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield getattr(leaf, "_local_tensor", leaf)


def _outputs_and_inputs(op: str, arguments: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation writes to, and those that it only reads."""
    outputs, inputs = [], []
    for name, value in arguments.items():
        tensors = [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
        is_input = name.startswith("input") or (name == "tensors" and op == "send")
        (inputs if is_input else outputs).extend(tensors)
    return outputs, inputs


def _overlaps(tensors: list[torch.Tensor], other: torch.Tensor) -> bool:
    first, last = _extent(other)
    return any(begin < last and first < end for begin, end in map(_extent, tensors))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory and the one after its last; equal ones if it has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return 0, 0
    first = storage.data_ptr() + tensor.storage_offset() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def _fill_with_garbage(tensor: torch.Tensor) -> None:
    with torch.no_grad(), _disable_current_modes():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data.fill_(float("nan"))
        elif tensor.numel():
            tensor.data.view(-1).view(torch.uint8).fill_(_GARBAGE)


def _is_batched() -> bool:
    """True if this operation comes from batch_isend_irecv()."""
    frame, torch_distributed = sys._getframe(2), os.path.dirname(dist.__file__)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(torch_distributed) and code.co_name == "batch_isend_irecv":
            return True
        frame = frame.f_back
    return False
