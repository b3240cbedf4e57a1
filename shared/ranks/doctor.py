"""The doctor's thread in a rank: it tells the kernel where the rank is right now.

A rank that hangs in a collective cannot run another cell, but this thread still runs: a collective does not hold the
GIL while it waits, and even an endless Python loop releases it every 5 ms. Questions and answers go through the
TCPStore that the kernel hosts. `diagnosis.py` interprets the answers.
"""

import contextlib
import json
import os
import resource
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import groupby

import psutil
import torch
import torch.distributed as dist

from shared.deadlines import scaled
from shared.ranks import interactive
from shared.ranks.diagnosis import name_ranks
from shared.ranks.output import log
from shared.wire import clock, frames, handles, instrumentation, mismatch

CUT = "The cell was stopped on this rank"
# Errors that only say that another rank failed first. They are never the cause.
_OTHERS_FAULT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Socket Timeout",
    "failed to pass monitoredBarrier",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",  # from NCCL
    "Broken pipe",
    CUT,
)
_ABORTS_WITHIN_S = scaled(1.0)  # after this, the doctor answers even if NCCL is still ending its communicators
_MAY_WAIT = (".synchronize(", ".item(", ".cpu(", ".tolist(")  # on a GPU, these calls wait for a collective
_FORM_GROUPS = ("new_group", "_new_group_with_tag", "split_group")
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_DROPPED_SHOWN = 20  # of the handles that were dropped
_GPU_COMPUTES = "its GPU has not finished what the cell launched"

_work: dict = {"busy": False, "stream": None, "synchronizes": False, "cut": False}
_quiet_sockets: set = set()  # connections that are not between ranks, and are therefore never cut


def work_begins(stream) -> None:
    instrumentation.recent_calls.clear()
    _work.update(busy=True, stream=stream, synchronizes=False, cut=False)


def cell_synchronizes() -> None:
    """Note that the cell has ended, and that the rank now waits for the collectives that it has launched."""
    _work.update(synchronizes=True)


def was_cut() -> bool:
    """Return whether the kernel has stopped the cell or call that this rank runs."""
    return _work["cut"]


def work_ends() -> None:
    _work.update(busy=False, synchronizes=False)


def listen(store: dist.TCPStore, rank: int) -> None:
    """Start the thread that answers the kernel. Must be called before any process group is formed."""
    _quiet_sockets.update(_connections())
    main_thread = threading.get_ident()
    threading.Thread(target=_answer, args=(store, rank, main_thread), daemon=True, name="doctor").start()


def _answer(store: dist.TCPStore, rank: int, main_thread: int) -> None:
    index = int(store.get("asked")) if store.check(["asked"]) else 0
    while True:
        index += 1
        try:
            store.wait([f"ask/{index}"], timedelta(days=30))
            question = store.get(f"ask/{index}").decode()
            if question == "cut":
                _stop_work()
                # A broken process group may raise anything, and this thread has to survive it.
                with contextlib.suppress(Exception):
                    abort_communication(_ABORTS_WITHIN_S)
            log.limit()
            answer = json.dumps(look(rank, main_thread))
            store.set(f"answer/{index}/{rank}", answer)
        except dist.DistError:
            os._exit(3)  # the kernel that hosts the store is gone, and a rank must not outlive it


def _stop_work() -> None:
    """Mark what this rank runs as stopped, so that it ends with an error, and drop its further output.

    gloo raises an error wherever a rank waits on a connection that was cut. NCCL does not: an aborted collective just
    ends, and leaves garbage in its output. So the rank may continue, and compute and print garbage.
    """
    if _work["busy"]:
        _work.update(cut=True)
        _work["stream"].drop_the_rest()


def look(rank: int, main_thread: int) -> dict:
    """Describe where this rank is, while its main thread keeps running."""
    try:
        return position(rank, main_thread)
    except Exception:  # the main thread's frames may change in the meantime; describe what is known without them
        return position(rank, None)


def position(rank: int, main_thread: int | None) -> dict:
    """Describe where this rank's main thread is, and which collectives it has launched.

    Over NCCL, the host may be `ahead` of its GPU: the GPU may be waiting in any of the cell's calls. `diagnosis.py`
    finds out in which one, from what the other ranks launched.
    """
    awaited = handles.waits_for(main_thread)
    call = awaited or instrumentation.last_call
    runs_ahead = _work["busy"] and instrumentation.host_runs_ahead()
    ahead = list(instrumentation.recent_calls) if runs_ahead else []
    here = {
        "rank": rank,
        "busy": _work["busy"],
        "counts": [[list(lane), count] for lane, count in instrumentation.counts.items()],
        "tag_counts": [[list(lane), tag, count] for (lane, tag), count in instrumentation.tag_counts.items()],
        "call": call and _as_json(call),
        "ahead": [_as_json(each) for each in ahead],
        "dropped": [_as_json(each) for each in handles.dropped[-_DROPPED_SHOWN:]],
        "printed": _last_line(_work["stream"]),
        "line": None,
        "waits": "no",
        "forms_group": False,
        "nccl": _uses_nccl(),
    }
    if _work["synchronizes"]:
        here["line"], here["waits"] = (None, "yes") if ahead else (_GPU_COMPUTES, "no")
    elif _work["busy"]:
        frame = None if main_thread is None else sys._current_frames().get(main_thread)
        stack = _stack(frame) + interactive.suspended_frames()
        index = next((i for i, frame in enumerate(stack) if frames.is_student_file(frame.f_code.co_filename)), None)
        if index is not None:
            frame = stack[index]
            here["line"] = frames.where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        # A check may wait outside the student's code.
        here["waits"] = "yes" if awaited else _waits(stack[:index], here["line"] or "")
        here["forms_group"] = any(_forms_group(frame.f_code) for frame in stack[:index])
    return here


def _uses_nccl() -> bool:
    """Return whether NCCL, or its simulation, runs this rank's operations."""
    if instrumentation.simulation is not None:
        return True
    return dist.is_initialized() and dist.Backend.NCCL in dist.get_backend_config()


def _stack(frame) -> list:
    """Return the frames of a stack, innermost first."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _waits(inner_frames: list, line: str) -> str:
    """Return whether the main thread is in a collective or waits for one: "yes", "maybe" or "no".

    The result is "maybe" in backward, which may be computing or waiting for DDP, and in lines that wait for a GPU.
    """
    files = [frame.f_code.co_filename for frame in inner_frames]
    names = [frame.f_code.co_name for frame in inner_frames]
    waits_for_gpu = any(frame.f_code is clock.wait_for.__code__ for frame in inner_frames)
    if waits_for_gpu or any(file.startswith(_DISTRIBUTED) for file in files) or ".wait(" in line:
        return "yes"
    return "maybe" if "_engine_run_backward" in names or any(pattern in line for pattern in _MAY_WAIT) else "no"


def _forms_group(code) -> bool:
    """Return whether this is a function of torch.distributed that waits until every rank has called it."""
    return code.co_filename.startswith(_DISTRIBUTED) and code.co_name in _FORM_GROUPS


def _as_json(call: instrumentation.Call) -> dict:
    return {
        "op": call.op,
        "number": call.number,
        "text": str(call),
        "must_agree": mismatch.must_agree(call),
        "lane": list(call.lane),
        "group": list(call.group_ranks),
        "partner": call.partner,
        "tag": call.tag,
        "line": frames.where(*call.called_from) if call.called_from else None,
    }


def _last_line(stream) -> str:
    lines = stream.getvalue().rstrip().rsplit("\n", 1) if stream is not None else [""]
    return lines[-1][-120:]


def abort_communication(aborts_within_s: float) -> bool:
    """Break this rank's connections to the other ranks, so that every rank that waits on them stops waiting.

    This ends a hang without losing variables. Waits in gloo and NCCL cannot be interrupted, and killing the process
    would lose the student's work.

    Args:
        aborts_within_s: How long to wait for NCCL to end its communicators.

    Returns:
        Whether NCCL ended them in time. If not, this rank cannot leave its process groups either.
    """
    if instrumentation.simulation is not None:
        instrumentation.simulation.cut.set()
    # NCCL comes first: if its sockets were closed under it, it would report a network error, and might never end.
    aborted = _abort(_nccl_backends(), aborts_within_s)
    for connection in _open_connections():
        with connection, contextlib.suppress(OSError):  # it may close while we look
            if _ends(connection) not in _quiet_sockets:
                connection.shutdown(socket.SHUT_RDWR)
    return aborted


def _nccl_backends() -> list:
    """Return the NCCL backend of each of this rank's process groups."""
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    nccl_groups = [group for group in groups if dist.Backend.NCCL in dist.get_backend_config(group)]
    return [group._get_backend(torch.device("cuda")) for group in nccl_groups]


def _abort(backends: list, within_s: float) -> bool:
    """End the communicators of each NCCL backend, with everything in flight. Return whether all of them ended in time.

    `abort()` returns once NCCL has ended the communicator, however long that takes: the timeout of the group does not
    interrupt it. So each abort runs in its own thread. All of them start at once, because ending one communicator may
    have to wait for a collective of another one that is still in flight on the GPU.
    """
    threads = [threading.Thread(target=_abort_one, args=(each,), daemon=True, name="abort") for each in backends]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _abort_one(backend) -> None:
    with contextlib.suppress(Exception):  # a traceback of this thread would appear in the student's output
        backend.abort()


def _connections() -> set:
    connections = set()
    for connection in _open_connections():
        with connection, contextlib.suppress(OSError):
            connections.add(_ends(connection))
    return connections


def _open_connections() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP connections. The caller closes them.

    They are found through the process's own file descriptors, because reading the system's table of connections takes
    10 ms.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # it may close while we look
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                connection = socket.socket(fileno=os.dup(descriptor))
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection
                else:
                    connection.close()


def _ends(connection: socket.socket) -> tuple:
    return connection.getsockname()[:2], connection.getpeername()[:2]


def describe_error(error: BaseException) -> dict:
    """Describe an exception for the kernel: kind, message, the student's lines, and whether another rank caused it."""
    message = _message_of(error)
    if isinstance(error, SyntaxError) and frames.is_cell(error.filename or ""):
        message = message.replace(f'File "{error.filename}"', "cell", 1)  # not its file name
    lines = [
        frames.where(summary.filename, summary.lineno or 0, summary.name)
        for summary in traceback.extract_tb(error.__traceback__)
        if frames.is_student_file(summary.filename)
    ]
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message
    return {
        "kind": type(error).__name__,
        "message": _readable(message),
        "lines": [line for line, _ in groupby(lines)],  # in a recursion, they are all the same
        "mismatch": mismatch.MESSAGE in message,
        "others_fault": any(pattern in message for pattern in _OTHERS_FAULT),
        "out_of_memory": out_of_memory,
        "held": _describe_memory() if out_of_memory else "",
        "gpu_lost": "CUDA error" in message,
        "batch_open": bool(dist.is_initialized() and dist.distributed_c10d._world.pg_coalesce_state),
    }


def _message_of(error: BaseException) -> str:
    """Return the message of an exception. For a CheckpointException, leave out each rank's traceback in torch."""
    failures = getattr(error, "failures", {}) if type(error).__name__ == "CheckpointException" else {}
    if not failures:
        return "".join(traceback.format_exception_only(error)).strip()
    merged: dict[str, list[int]] = {}
    for rank, (failure, _) in sorted(failures.items()):
        merged.setdefault("".join(traceback.format_exception_only(failure)).strip(), []).append(rank)
    return "CheckpointException: " + "; ".join(f"{name_ranks(ranks)}: {message}" for message, ranks in merged.items())


def _describe_memory() -> str:
    """Return a sentence on how much memory this process holds, and how much is free or allowed."""
    if torch.cuda.is_initialized():
        free_gb, total_gb = (nbytes / 1e9 for nbytes in torch.cuda.mem_get_info())
        held_gb = torch.cuda.memory_allocated() / 1e9
        return f"Its tensors hold {held_gb:.2f} GB of its GPU's {total_gb:.2f} GB, and {free_gb:.2f} GB are free."
    held_gb, free_gb = psutil.Process().memory_info().rss / 1e9, psutil.virtual_memory().available / 1e9
    limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit_bytes != resource.RLIM_INFINITY:
        return f"Its process holds {held_gb:.1f} GB, and may hold {limit_bytes / 1e9:.1f} GB."
    return f"Its process holds {held_gb:.2f} GB; this machine has {free_gb:.2f} GB left."


def _readable(message: str) -> str:
    """Remove torch's C++ stack and build paths from a message, and limit its length."""
    message = message.split("\nException raised from ")[0]
    return message[:800]
