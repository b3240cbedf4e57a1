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
from collections import Counter
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shared.wire import frames
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
_TORCH_DISTRIBUTED = os.path.dirname(dist.__file__)
# Every dispatch passes this key, also under no_grad, under inference_mode and for DTensor, and torch uses it only for
# factory functions.
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

    @property
    def lane(self) -> tuple:
        """The sequence that `number` counts in: that of the group, or of one direction between two ranks."""
        return lane_of(self.op, self.group_name, self.partner)

    def __str__(self) -> str:
        other = self.root if self.partner is None else self.partner
        preposition = "to" if self.op in ("send", "reduce", "gather") else "from"
        direction = "" if other is None else f" {preposition} rank {other}"
        return f"{self.op} #{self.number}{direction} ({self.dtype}, {_size(self.shape)})"


def lane_of(op: str, group_name: str, partner: int | None) -> tuple:
    return (group_name, op, partner) if op in POINT_TO_POINT else (group_name,)


counts: Counter = Counter()  # lane → operations launched since the process group was formed
last_call: Call | None = None
before_launch: list = []  # functions called with each Call before its launch, which may reject it by raising
work_wrappers: list = []  # functions called with a Call and its Work; the caller gets the Work that they return
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
    last_call = None


def simulate_nccl(on: bool) -> None:
    """Switch the simulation of NCCL on or off on this rank (see simulated_nccl.py)."""
    global simulation
    if simulation is not None:
        simulation.stop()
    simulation = Simulation() if on else None
    if simulation is not None:
        simulation.start()


def synchronize(pause_s: float = 1e-4) -> None:
    """Wait for the collectives that this rank has launched and that its current stream waits for.

    Over gloo, a synchronous call has waited already. Over NCCL it only made the GPU's stream wait, so without this a
    hang would be blamed on a later cell.

    Args:
        pause_s: How long to sleep between two looks at the GPU. 0 finds the end of the work as soon as possible, and
            takes a core meanwhile.
    """
    if simulation is not None:
        simulation.synchronize()
    elif torch.cuda.is_initialized():
        reached = torch.cuda.Event()
        reached.record()
        while not reached.query():  # unlike synchronize(), this lets Ctrl-C and the doctor through
            time.sleep(pause_s)


def simulated_bytes() -> int:
    """Return the bytes that the simulation of NCCL holds on this rank, and that NCCL would not."""
    return simulation.copied_bytes if simulation is not None else 0


@contextlib.contextmanager
def listening(launched=None, waiting=None):
    """Record, in order, the calls that this rank launches inside the block. Yields the list of calls.

    Args:
        launched: Called after each launch with the Call, its Work (None if it has none) and its tensors.
        waiting: Called with a tensor. Returns a context manager around the wait in C++ for the functional collective
            that writes to it.
    """
    calls: list[Call] = []
    listener = (calls, launched, waiting)
    _listeners.append(listener)
    try:
        yield calls
    finally:
        # By identity, because two listeners that recorded the same calls compare equal.
        _listeners[:] = [other for other in _listeners if other is not listener]


def _hooked(operator, name: str):
    argument_names = [argument.name for argument in operator._schema.arguments]

    def hook(keyset, *args, **kwargs):
        arguments = dict(zip(argument_names, args, strict=False)) | kwargs
        call = _record(name, arguments)
        if simulation is not None:
            result, work = simulation.launch(call, operator, keyset & _LATER_KEYS, arguments)
            _tell_listeners(call, work, arguments)
            return result
        result = operator.redispatch(keyset & _LATER_KEYS, *args, **kwargs)
        if not _listeners and not work_wrappers:
            return result
        rest, boxed = ([*result[:-1]], result[-1]) if isinstance(result, (tuple, list)) else (None, result)
        work = dist.Work.unbox(boxed) if boxed is not None else None  # a monitored barrier has no Work
        if work is not None and work_wrappers:
            for wrap in work_wrappers:
                work = wrap(call, work)
            result = work.boxed() if rest is None else (*rest, work.boxed())
        _tell_listeners(call, work, arguments)
        return result

    return hook


def _tell_listeners(call: Call, work, arguments: dict) -> None:
    for _, launched, _ in _listeners:
        if launched is not None:
            launched(call, work, _tensors(list(arguments.values())))


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
    partner = arguments.get("dst") if op == "send" else arguments.get("src") if op == "recv" else None
    partner = ranks[partner] if partner is not None else None
    root = arguments.get("root_rank")
    tensors = _payload(op, arguments)
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    payload_bytes = 0 if op.endswith("barrier") else sum(tensor.nbytes for tensor in tensors)
    if op in ("gather", "scatter") and root != group.rank():  # only the root has the full buffer
        payload_bytes *= group.size()
    lane = lane_of(op, group.group_name, partner)
    caller = frames.innermost_student_frame(sys._getframe(2))
    counts[lane] += 1
    last_call = Call(
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
    )
    for check in before_launch:
        check(last_call)
    if before_launch:  # mismatch detection takes time that is not part of the collective
        last_call = replace(last_call, launched_s=time.perf_counter())
    for calls, _, _ in _listeners:
        calls.append(last_call)
    return last_call


def _payload(op: str, arguments: dict) -> list[torch.Tensor]:
    """Return the tensors of the full buffer: an all-to-all's input, otherwise the larger of input and output."""
    if op == "all_to_all":
        return _tensors(arguments["input_tensors"])
    if op == "all_to_all_single":
        return _tensors(arguments["input"])
    return max((_tensors(value) for value in arguments.values()), key=lambda tensors: sum(t.nbytes for t in tensors))


def _kept_bytes(op: str, arguments: dict, group_rank: int) -> int:
    if op == "all_to_all":
        return arguments["input_tensors"][group_rank].nbytes
    if op == "all_to_all_single":
        tensor, sizes = arguments["input"], arguments["input_split_sizes"]
        if not sizes:
            return tensor.nbytes // dist.ProcessGroup.unbox(arguments["process_group"]).size()
        return tensor.nbytes * sizes[group_rank] // max(1, sum(sizes))
    return 0


def _is_async(op: str, arguments: dict) -> bool:
    """Return whether the caller asked for an asynchronous operation.

    A collective has an argument for it. `dist.send` is an isend followed by a wait, so its callers have to be
    inspected.
    """
    if op not in POINT_TO_POINT:
        return arguments.get("async_op", True)
    frame = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
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
