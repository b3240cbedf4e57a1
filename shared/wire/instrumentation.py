"""Hooks on this rank's collectives: each launch is counted and reported to the listeners.

Every collective is a dispatcher operator (`c10d::allreduce_` and its siblings), no matter who calls it: your code,
DDP's reducer in C++, FSDP or DTensor. A hook runs a Python function before the kernels of these operators, and of no
others, so it adds no cost to computation. The doctor reads the counts to find out which rank waits for which. The wire
ledger and the checks are listeners.
"""

import contextlib
import math
import os
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shared.wire import clock, completion, frames, sizes
from shared.wire.simulated_nccl import Simulation

# Operators of c10d → the names of the same collectives in torch.distributed.
OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
POINT_TO_POINT = ("send", "recv")
# Functions of torch and of this package run between the caller and the hook, to watch handles or to simulate NCCL.
_BETWEEN = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
# Every dispatch passes through this key, even under no_grad or inference_mode and for DTensor, and torch itself uses it
# only for factory functions.
_KEY = "BackendSelect"
_LATER_KEYS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@dataclass(frozen=True)
class Call:
    """One collective or point-to-point operation, as launched by this rank."""

    op: str
    number: int  # 1 for the group's first collective; point-to-point operations are counted per partner and direction
    group_name: str
    group_ranks: tuple[int, ...]  # global ranks
    shape: tuple[int, ...]  # of the largest tensor
    dtype: str
    payload_bytes: int  # the size of the full buffer, as if one rank held all of it
    partner: int | None  # the other end of a send or recv, as a global rank
    root: int | None  # the source of a broadcast or scatter, or the destination of a reduce or gather; a global rank
    kept_bytes: int  # the slice of an all-to-all that this rank keeps
    is_async: bool
    in_backward: bool
    launched_s: float
    called_from: tuple[str, int, str] | None  # the student's file, line and function; None in autograd's threads
    tag: int | None = None  # of a send or receive whose partner must use the same one, which NCCL does not ask for

    @property
    def lane(self) -> tuple:
        """The sequence that `number` counts in: that of the group, or of one direction between two ranks."""
        return lane_of(self.op, self.group_name, self.partner)

    def __str__(self) -> str:
        other = self.root if self.partner is None else self.partner
        preposition = "to" if self.op in ("send", "reduce", "gather") else "from"
        direction = "" if other is None else f" {preposition} rank {other}"
        # A barrier has a tensor inside torch, but the caller did not pass one.
        tensor = "" if "barrier" in self.op else f" ({self.dtype}, {_size(self.shape)})"
        return f"{self.op} #{self.number}{direction}{tensor}"


def lane_of(op: str, group_name: str, partner: int | None) -> tuple:
    return (group_name, op, partner) if op in POINT_TO_POINT else (group_name,)


counts: Counter = Counter()  # lane → operations launched since the process group was formed
tag_counts: Counter = Counter()  # (lane, tag) → those of them that have this tag
last_call: Call | None = None
recent_calls: deque = deque(maxlen=50)  # the latest launches; the doctor empties it when a cell begins
before_launch: list = []  # functions called with each Call before its launch, which may reject it by raising
work_wrappers: list = []  # functions called with a Call and its Work; the caller gets the Work that they return
recorder: sizes.Recorder | None = None  # records the sizes of sends and receives
simulation: Simulation | None = None  # of NCCL; if there is one, it launches every operation
_listeners: list = []
_libraries: list[torch.library.Library] = []  # keep the registrations alive


def install() -> None:
    """Install the hooks, once per process."""
    if _libraries:
        return
    _libraries.extend(torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional"))
    calls, waits = _libraries
    waits.impl("wait_tensor", _hooked_wait, _KEY, with_keyset=True)
    for operator, name in OPERATORS.items():
        packet = getattr(torch.ops.c10d, operator, None)
        if packet is None:
            continue  # this release of torch does not have it
        calls.impl(operator, _hooked(packet.default, name), _KEY, with_keyset=True)


def reset() -> None:
    """Reset the counts, because a new process group starts its own sequence."""
    global last_call
    counts.clear()
    tag_counts.clear()
    recent_calls.clear()
    last_call = None
    if recorder is not None:
        recorder.clear()


def simulate_nccl(on: bool) -> None:
    """Switch the simulation of NCCL on or off on this rank (see shared/wire/simulated_nccl)."""
    global simulation
    if simulation is not None:
        simulation.stop()
    simulation = Simulation() if on else None
    if simulation is not None:
        simulation.start()


def synchronize(pause_s: float = clock.PAUSE_S) -> None:
    """Wait for the collectives that this rank has launched and that its current stream waits for.

    Over gloo, a synchronous call has waited already. Over NCCL it only made the GPU's stream wait, so without this a
    hang would be blamed on a later cell.

    Args:
        pause_s: How long to sleep between two queries of the GPU. With 0, the end of the work is noticed as soon as
            possible, but the wait keeps a core busy.
    """
    if simulation is not None:
        simulation.synchronize()
    elif torch.cuda.is_initialized():
        reached = torch.cuda.Event()
        reached.record()
        clock.wait_for(reached, pause_s)


def host_runs_ahead() -> bool:
    """Return whether this rank's host may be many calls ahead of the collective that its stream waits for."""
    return simulation is not None or torch.cuda.is_initialized()


@contextlib.contextmanager
def violations_accepted():
    """Let simulated NCCL accept wrong uses of tensors inside the block, for a check that makes them on purpose."""
    if simulation is not None:
        simulation.accepts_violations = True
    try:
        yield
    finally:
        if simulation is not None:
            simulation.accepts_violations = False


def simulated_bytes() -> int:
    """Return the bytes that the simulation of NCCL holds on this rank, but that NCCL would not hold."""
    return simulation.copied_bytes if simulation is not None else 0


@contextlib.contextmanager
def listening(launched=None, waiting=None):
    """Record, in order, the calls that this rank launches inside the block. Yields the list of calls.

    Args:
        launched: Called after each launch with the Call, its Work and its tensors. If the operation has no Work, like a
            synchronous one over NCCL, a `completion.WithoutWork` stands in for it.
        waiting: Called with a tensor. Returns a context manager around the wait in C++ for the functional collective
            that writes to it.
    """
    calls: list[Call] = []
    listener = (calls, launched, waiting)
    _listeners.append(listener)
    try:
        yield calls
    finally:
        # Compare by identity, because two listeners that recorded the same calls are equal.
        _listeners[:] = [other for other in _listeners if other is not listener]


def _hooked(operator, name: str):
    argument_names = [argument.name for argument in operator._schema.arguments]

    def hook(keyset, *args, **kwargs):
        arguments = dict(zip(argument_names, args, strict=False)) | kwargs
        call = _record(name, arguments)
        began = completion.marks()
        simulator = simulation if simulation is not None and simulation.watches_this_thread() else None
        if simulator is not None:
            result, work = simulator.launch(call, operator, keyset & _LATER_KEYS, arguments)
        else:
            result = operator.redispatch(keyset & _LATER_KEYS, *args, **kwargs)
            if not _listeners and not work_wrappers:
                return result
            work = _work_of(result)
            if work is not None and work_wrappers:
                for wrap in work_wrappers:
                    work = wrap(call, work)
                result = _with_work(result, work)
        if work is None:
            operation = completion.WithoutWork(began)
            _tell_listeners(call, operation, arguments)
            operation.launched(call.is_async)
            return result
        _tell_listeners(call, work, arguments)
        if simulator is not None and not call.is_async:
            completion.waited(work, began)
        return result

    return hook


def _work_of(result) -> dist.Work | None:
    """Return the Work in an operator's result, or None if it has none."""
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    return None if boxed is None else dist.Work.unbox(boxed)


def _with_work(result, work: dist.Work):
    """Return an operator's result with another Work."""
    return (*result[:-1], work.boxed()) if isinstance(result, (tuple, list)) else work.boxed()


def _tell_listeners(call: Call, operation, arguments: dict) -> None:
    for _, launched, _ in _listeners:
        if launched is not None:
            launched(call, operation, _tensors(list(arguments.values())))


def _hooked_wait(keyset, tensor):
    """Hook the operator that waits for functional collectives, which DTensor uses."""
    with contextlib.ExitStack() as waits:
        for _, _, waiting in _listeners:
            if waiting is not None:
                waits.enter_context(waiting(tensor))
        return torch.ops._c10d_functional.wait_tensor.default.redispatch(keyset & _LATER_KEYS, tensor)


def _record(op: str, arguments: dict) -> Call:
    global last_call
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    if op in POINT_TO_POINT:
        _check_device(op, arguments["tensors"][0].device, group)
    partner = arguments.get("dst") if op == "send" else arguments.get("src") if op == "recv" else None
    if partner == group.rank():
        _check_self(op, group)
    partner = ranks[partner] if partner is not None else None
    root = arguments.get("root_rank")
    tensors = _payload(op, arguments)
    largest = max(tensors, key=_bytes_of)
    payload_bytes = 0 if op.endswith("barrier") else sum(map(_bytes_of, tensors))
    if op in ("gather", "scatter") and root != group.rank():  # only the root has the full buffer
        payload_bytes *= group.size()
    lane = lane_of(op, group.group_name, partner)
    # On a GPU, DDP launches from a thread of autograd, where nothing in Python has called the hook.
    caller = frames.innermost_student_frame(sys._getframe(1).f_back)
    counts[lane] += 1
    tag = arguments["tag"] if op in POINT_TO_POINT and _compares_tags(arguments["tensors"][0].device) else None
    if tag is not None:
        tag_counts[lane, tag] += 1
    # A thread that saves a checkpoint may launch a call at the same time, and replace `last_call`.
    last_call = call = Call(
        op=op,
        number=counts[lane],
        group_name=group.group_name,
        group_ranks=ranks,
        shape=tuple(largest.shape),
        dtype=str(largest.dtype).removeprefix("torch."),
        payload_bytes=payload_bytes,
        partner=partner,
        root=ranks[root] if root is not None else None,
        kept_bytes=_kept_bytes(op, arguments, group.rank()),
        is_async=_is_async(op, arguments),
        in_backward=torch._C._current_graph_task_id() != -1,
        launched_s=time.perf_counter(),
        called_from=(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name) if caller else None,
        tag=tag,
    )
    for check in before_launch:
        check(call)
    if before_launch:  # mismatch detection takes time that is not part of the collective
        last_call = call = replace(call, launched_s=time.perf_counter())
    recent_calls.append(call)
    if recorder is not None and op in POINT_TO_POINT:
        recorder.write(call)
    for calls, _, _ in _listeners:
        calls.append(call)
    return call


def _check_device(op: str, device: torch.device, group: dist.ProcessGroup) -> None:
    """Check that a tensor is where gloo can send or receive it.

    gloo copies the tensors of a collective from a GPU and back. In a send or receive, it would treat their addresses as
    addresses on the CPU, and fail with "Bad address" or crash the process.
    """
    if device.type != "cpu" and dist.get_backend(group) == "gloo":
        raise RuntimeError(
            f"gloo cannot {op} a tensor on {device}, although its collectives can use one. Start the ranks with "
            "backend='gloo:cpu', or with backend='nccl:shared' if NCCL is 2.30 or later."
        )


def _compares_tags(device: torch.device) -> bool:
    """Return whether a receive of a tensor on this device only takes a message with its own tag, as over gloo."""
    return device.type == "cpu" and simulation is None


def _check_self(op: str, group: dist.ProcessGroup) -> None:
    """Reject a send to this rank itself, or a receive from it. gloo would fail with "Pair is not connected".

    Torch itself rejects only `dist.send`, with an error that begins with the same words.
    """
    if dist.get_backend(group) == "gloo":
        end, call = ("destination", "send to") if op == "send" else ("source", "receive from")
        raise ValueError(f"Invalid {end} rank: a rank cannot {call} itself over gloo.")


def _payload(op: str, arguments: dict) -> list[torch.Tensor]:
    """Return the tensors of the full buffer: an all-to-all's input, otherwise the larger of input and output."""
    if op == "all_to_all":
        return _tensors(arguments["input_tensors"])
    if op == "all_to_all_single":
        return _tensors(arguments["input"])
    return max((_tensors(value) for value in arguments.values()), key=lambda tensors: sum(map(_bytes_of, tensors)))


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return a tensor's size, whatever a subclass of it says."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.numel(tensor) * torch.Tensor.element_size(tensor)


def _kept_bytes(op: str, arguments: dict, group_rank: int) -> int:
    if op == "all_to_all":
        return _bytes_of(arguments["input_tensors"][group_rank])
    if op == "all_to_all_single":
        tensor, sizes = arguments["input"], arguments["input_split_sizes"]
        if not sizes:
            return _bytes_of(tensor) // dist.ProcessGroup.unbox(arguments["process_group"]).size()
        return _bytes_of(tensor) * sizes[group_rank] // max(1, sum(sizes))
    return 0


def _is_async(op: str, arguments: dict) -> bool:
    """Return whether the caller asked for an asynchronous operation.

    A collective has an argument for it. `dist.send` is an isend followed by a wait, so its callers have to be
    inspected.
    """
    if op == "monitored_barrier":
        return False
    if op not in POINT_TO_POINT:
        return arguments.get("async_op", True)
    frame = sys._getframe(2).f_back
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        if frame.f_code.co_name == op:
            return False
        frame = frame.f_back
    return True


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _size(shape: tuple[int, ...]) -> str:
    elements = math.prod(shape)
    return f"{elements} element" + ("s" if elements != 1 else "")
