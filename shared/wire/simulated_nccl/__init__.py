"""Simulates over gloo how NCCL's collectives behave toward the host, so that bugs that gloo hides become errors.

On a GPU, a collective only *launches* work on a stream. The host continues at once, and the output holds garbage until
the current stream has waited for the collective. Code that forgets to wait, or that changes or frees a tensor in
flight, often passes on gloo and computes wrong values on NCCL. Here, such code raises NCCLViolation:

- A synchronous collective gives its caller no Work, and returns before it is complete. It runs on the current stream,
  so later operations find its result. An asynchronous one runs on the stream of its process group, and returns a Work.
  Its `wait()` does not block the host: it makes later operations on the current stream wait for this collective, and
  for earlier ones on the same stream as this one.
- gloo works on copies. Until an operation uses the outputs, they hold NaN, or bytes 0x55 in tensors of integers.
- It is an error to use an output before `wait()`, to write to an input in flight, or to free either while in flight.
- The operations of a `batch_isend_irecv()` run at the same time, so a receive into memory that another one uses is an
  error.
- The first unbatched send from one rank to another blocks both until they have called send and receive, because NCCL
  then connects them. A signal cannot interrupt this.
- After a cut, operations in flight end without an error, and their outputs keep the garbage. New ones fail.
- `dist.get_backend()` returns what it returns on ranks with a GPU each: "cpu:gloo,cuda:nccl", because they have NCCL
  for tensors on the GPU and gloo for those on the CPU. So code that compares it with "nccl" fails here, too.

The simulation has limits. Times mean nothing. A rank has one stream besides those of its process groups. An operation
whose future was taken, as DDP does, counts as waited for when it completes. Later unbatched sends do not block each
other, although NCCL runs them one after another. `batch_isend_irecv()` returns one Work per operation, but NCCL returns
one for all of them. The operator of a synchronous collective returns a Work, which torch.distributed waits for and
drops, but NCCL's operator returns none. A group that was created with `backend="gloo"` is simulated, too. A read
through a raw pointer is not detected. Other threads, such as one that saves a checkpoint, are neither simulated nor
checked.
"""

import contextlib
import itertools
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._prims_common import suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from shared.deadlines import scaled
from shared.wire import completion
from shared.wire.simulated_nccl import flights
from shared.wire.simulated_nccl.flights import CURRENT_STREAM, Flight, SimulatedWork

BACKEND = "cpu:gloo,cuda:nccl"
CONNECT_TIMEOUT_S = scaled(15.0)
CUT_WITHIN_S = scaled(5.0)  # if another rank has closed a connection, this rank's own are cut within this time
_CLOSED_BY_ANOTHER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # errors of gloo
_BATCH = dist.batch_isend_irecv.__code__


class NCCLViolation(RuntimeError):
    """Code that may pass on gloo, but computes wrong values or hangs on NCCL."""


class Simulation:
    """NCCL on this rank: launches operations, and judges how the rank's code uses their tensors."""

    def __init__(self):
        self.flights: list[Flight] = []  # in the order of their launches
        self.cut = threading.Event()  # set when this rank's connections to the other ranks are cut
        self.accepts_violations = False
        self._copies: list[tuple[StorageWeakRef, int]] = []  # with their bytes
        self._connected: set[str] = set()
        self._watching = contextlib.ExitStack()

    @property
    def copied_bytes(self) -> int:
        """The memory of the copies on which gloo works. Its threads free some of them shortly after the operation."""
        return sum(nbytes for storage, nbytes in self._copies if not storage.expired())

    def start(self) -> None:
        """Watch what this thread does with tensors, and the backward passes that it starts."""
        self._thread = threading.get_ident()
        self._watching.enter_context(flights.shown_to(self))
        self._watching.enter_context(_backend_named_as_on_gpus())

    def stop(self) -> None:
        self._watching.close()

    def watches_this_thread(self) -> bool:
        """Return whether this is the thread that called start(), or one of a backward pass."""
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    # -- launching

    def launch(self, call, operator, keyset, arguments: dict):
        """Launch an operation on copies of its tensors.

        Returns what the operator returns, and the operation's Work, which a synchronous call does not return.

        Raises:
            NCCLViolation: If the operation uses a tensor that is in flight, or its partner never calls.
            RuntimeError: If NCCL does not have this operation, or the rank's connections were cut.
        """
        if self.cut.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {dist.get_rank()}")
        outputs, inputs = _outputs_and_inputs(call, arguments)
        _check(call, [*outputs, *inputs])
        if not self.accepts_violations:
            _check_batch(_batch())
        stream = _stream_of(call)
        for tensor in inputs:
            self.use(tensor, writes=False, stream=stream)
        for tensor in outputs:
            self.use(tensor, writes=True, stream=stream)
        self.synchronize()  # the GPU starts an operation when the current stream reaches it
        if call.partner is not None and not _batch():
            self._connect(call)
        flight = Flight(call, stream, outputs, inputs)
        self._copies = [copy for copy in self._copies if not copy[0].expired()]
        self._copies += [(StorageWeakRef(copy.untyped_storage()), copy.nbytes) for copy in flight.copies]
        result = operator.redispatch(keyset, **flight.with_copies(arguments))
        *tensors, boxed = result if isinstance(result, (tuple, list)) else [result]
        flight.work = dist.Work.unbox(boxed)
        flight.fill_outputs_with_garbage()
        self.flights.append(flight)
        work = SimulatedWork(self, flight)
        result = (*flight.with_originals(tensors), work.boxed()) if tensors else work.boxed()
        return result, work

    def _connect(self, call) -> None:
        """Wait until the partner calls the matching operation, if this is the first transfer in this direction."""
        me, other = dist.get_rank(), call.partner
        sender, receiver = (me, other) if call.op == "send" else (other, me)
        connection = f"simulated NCCL/{call.group_name}/{sender} to {receiver}"
        if connection in self._connected:
            return
        self._connected.add(connection)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{connection}/{me}", "here")
        try:
            store.wait([f"{connection}/{other}"], timedelta(seconds=CONNECT_TIMEOUT_S))
        except dist.DistError:
            opposite = "receive" if call.op == "send" else "send"
            raise NCCLViolation(
                f"{call} waited {CONNECT_TIMEOUT_S:g} s for rank {other} to call the matching {opposite}, and on NCCL "
                "it would wait forever: the first unbatched send or receive connects the two ranks, and blocks until "
                "each has called its end. Put both into one dist.batch_isend_irecv(), or let the ranks take turns"
            ) from None

    # -- what runs after what

    def use(self, tensor: torch.Tensor, writes: bool, stream: str = CURRENT_STREAM) -> None:
        """Note that an operation on a stream uses a tensor: it needs the results of what runs before it.

        Raises:
            NCCLViolation: If the tensor is in flight, and nothing makes the stream wait for that operation.
        """
        for flight in self.flights[:]:
            kind = flight.conflict_with(tensor, writes)
            if not kind:
                continue
            if flight.waited or flight.stream == stream:
                self._land(flight)
            elif not self.accepts_violations:
                how = "written to" if writes else "used"
                consequence = "it holds garbage" if kind == "output" else "the other ranks may get the new values"
                raise NCCLViolation(
                    f"the {kind} of {flight.call} was {how} before wait(): on NCCL, {consequence}{flight.origin}"
                )

    def free(self, storage: torch.UntypedStorage) -> None:
        """Note that the memory of a storage is about to be freed.

        Raises:
            NCCLViolation: If an operation in flight still uses the memory.
        """
        for flight in self.flights[:]:
            kind = flight.use_of(storage)
            if kind and not flight.waited:
                raise NCCLViolation(
                    f"the {kind} of {flight.call} was freed before wait(): on NCCL, another tensor may get its memory"
                    f"{flight.origin}"
                )
            if kind:
                self._land(flight)

    def wait(self, flight: Flight) -> None:
        """Make the current stream wait for an operation, and thereby for all earlier ones on that one's stream."""
        if flight not in self.flights:
            return
        for earlier in self.flights[: self.flights.index(flight) + 1]:
            earlier.waited |= earlier.stream == flight.stream
        if flight.call.op == "barrier":  # the only operation that the host waits for, too
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for everything that the current stream waits for."""
        for flight in self.flights[:]:
            if flight.waited:
                self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Wait until an operation is complete, and put its results into the caller's tensors."""
        work = flight.work
        self.complete(flight, lambda: completion.untimed_wait(work))
        if flight.waited and flight in self.flights:
            self.flights.remove(flight)
            flight.forget_tensors()

    def complete(self, flight: Flight, wait) -> None:
        """Call wait() for an operation that has not landed, and put its results into the caller's tensors."""
        if flight.landed:
            return
        try:
            with completion.landing(flight):
                wait()
                flight.put_results()
        except RuntimeError as error:
            # The ranks are cut one after the other, so another rank may have closed the connection a moment earlier.
            closed_by_another = any(pattern in str(error) for pattern in _CLOSED_BY_ANOTHER)
            if not self.cut.wait(CUT_WITHIN_S if closed_by_another else 0):
                raise
        finally:
            flight.land()


@contextlib.contextmanager
def _backend_named_as_on_gpus():
    """Let `dist.get_backend()` return BACKEND for groups on gloo, but not to torch, which would look for a GPU."""
    original = dist.get_backend

    def get_backend(group=None):
        backend = original(group)
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return BACKEND if backend == "gloo" and not asks.startswith("torch.") else backend

    dist.get_backend = get_backend
    try:
        yield
    finally:
        dist.get_backend = original


def _check(call, tensors: list[torch.Tensor]) -> None:
    """Raise an error for an operation that NCCL does not support."""
    if call.op == "monitored_barrier":
        raise RuntimeError("NCCL does not support monitored_barrier")
    if call.op == "recv" and call.partner is None:
        raise RuntimeError("NCCL does not support recv from any source")
    for tensor in tensors:
        if not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
            raise ValueError(f"Tensors must be contiguous: {call} got strides {tensor.stride()}")


def _check_batch(batch: list[dist.P2POp]) -> None:
    """Raise NCCLViolation for a receive into memory that another operation of the batch uses."""
    for one, other in itertools.combinations(batch, 2):
        if dist.irecv in (one.op, other.op) and flights.overlap(one.tensor, other.tensor):
            names = " and ".join(f"{each.op.__name__} with rank {each.peer}" for each in (one, other))
            raise NCCLViolation(
                f"{names} are in one batch and use the same memory: on NCCL, they run at the same time, so a rank may "
                "get a mixture of old and new values. Receive into another tensor"
            )


def _stream_of(call) -> str:
    """Return the stream on which NCCL runs an operation, as of torch 2.8."""
    if not call.is_async:
        return CURRENT_STREAM
    if call.partner is None or _batch():
        return call.group_name
    return f"{call.group_name}, with rank {call.partner}"  # unless init_process_group() was given a device_id


def _batch() -> list[dist.P2POp]:
    """Return the operations of the batch_isend_irecv() that launches an operation, or none if nothing is batched."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _BATCH:
        frame = frame.f_back
    return frame.f_locals["p2p_op_list"] if frame is not None else []


def _outputs_and_inputs(call, arguments: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation writes to on this rank, and those that it only reads."""
    is_root = call.root == dist.get_rank()
    only_reads = call.op == "send" or (call.op == "broadcast" and is_root) or (call.op == "reduce" and not is_root)
    outputs, inputs = [], []
    for name, value in arguments.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        (inputs if only_reads or name.startswith("input") else outputs).extend(tensors)
    return outputs, inputs
