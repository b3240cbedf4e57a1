"""The doctor's eyes on one rank: where it is right now, asked by the kernel, answered by a thread.

A rank that hangs in a collective answers no cell. This thread still runs: a collective waits without
holding Python's lock, and even an endless Python loop hands it over every 5 ms. Questions and answers
go through the TCPStore that the kernel hosts. What the answers mean is `diagnosis.py`'s business.
"""

import contextlib
import json
import os
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import groupby

import psutil
import torch
import torch.distributed as dist

from shared.ranks.diagnosis import name_ranks
from shared.wire import frames, instrumentation, mismatch

# Errors that say only that some other rank failed first: never the cause.
_OTHERS_FAULT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Socket Timeout",
    "failed to pass monitoredBarrier",
    "NCCL communicator was aborted",
    "Broken pipe",
)
_MAY_WAIT = (".synchronize(", ".item(", ".cpu(", ".tolist(")  # on a GPU it is these that wait for a collective
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep

_work: dict = {"busy": False, "stream": None}
_quiet_sockets: set = set()  # connections that are not between ranks, so never cut


def work_begins(stream) -> None:
    _work.update(busy=True, stream=stream)


def work_ends() -> None:
    _work.update(busy=False)


def listen(store: dist.TCPStore, rank: int) -> None:
    """Start the thread that answers the kernel. Call it before any process group is formed."""
    _quiet_sockets.update(_connections())
    main_thread = threading.get_ident()
    threading.Thread(target=_answer, args=(store, rank, main_thread), daemon=True, name="doctor").start()


def _answer(store: dist.TCPStore, rank: int, main_thread: int) -> None:
    number = int(store.get("asked")) if store.check(["asked"]) else 0
    while True:
        number += 1
        try:
            store.wait([f"ask/{number}"], timedelta(days=30))
            question = store.get(f"ask/{number}").decode()
            if question == "cut":
                with contextlib.suppress(Exception):  # whatever a broken group says, the doctor lives on
                    cut()
            answer = json.dumps(look(rank, main_thread))
            store.set(f"answer/{number}/{rank}", answer)
        except dist.DistError:
            os._exit(3)  # the kernel that hosts the store is gone: a rank must not outlive it


def look(rank: int, main_thread: int) -> dict:
    """Describe where this rank is, whatever it does meanwhile."""
    try:
        return position(rank, main_thread)
    except Exception:  # the main thread runs on, and its frames with it: say what is known without them
        return position(rank, None)


def position(rank: int, main_thread: int | None) -> dict:
    """Describe where this rank's main thread is, and which collectives it has launched."""
    call = instrumentation.last_call
    here = {
        "rank": rank,
        "busy": _work["busy"],
        "counts": [[list(lane), count] for lane, count in instrumentation.counts.items()],
        "call": call and _as_json(call),
        "printed": _last_line(_work["stream"]),
        "line": None,
        "waits": "no",
    }
    if _work["busy"]:
        stack = _stack(sys._current_frames().get(main_thread))
        own = next((n for n, frame in enumerate(stack) if frames.is_students(frame.f_code.co_filename)), None)
        if own is not None:
            here["line"] = frames.where(stack[own].f_code.co_filename, stack[own].f_lineno, stack[own].f_code.co_name)
        here["waits"] = _waits(stack[:own], here["line"] or "")  # a check may wait where no line is the student's
    return here


def _stack(frame) -> list:
    """Innermost frame first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _waits(inner_frames: list, line: str) -> str:
    """Is the main thread inside a collective, or a wait on one? Backward may compute, or wait for DDP."""
    files = [frame.f_code.co_filename for frame in inner_frames]
    names = [frame.f_code.co_name for frame in inner_frames]
    if any(file.startswith(_DISTRIBUTED) for file in files) or ".wait(" in line:
        return "yes"
    return "maybe" if "_engine_run_backward" in names or any(sign in line for sign in _MAY_WAIT) else "no"


def _as_json(call: instrumentation.Call) -> dict:
    return {
        "op": call.op,
        "number": call.number,
        "text": str(call),
        "must_agree": mismatch.must_agree(call),
        "lane": list(call.lane),
        "group": list(call.group_ranks),
        "partner": call.partner,
        "line": frames.where(*call.called_from) if call.called_from else None,
    }


def _last_line(stream) -> str:
    lines = stream.getvalue().rstrip().rsplit("\n", 1) if stream is not None else [""]
    return lines[-1][-120:]


def cut() -> None:
    """Break this rank's connections to the other ranks, so that whoever waits on them gets an error.

    It is how a hang ends with every variable kept: gloo's waits cannot be interrupted, and killing the
    process would lose the student's work.
    """
    if dist.is_initialized() and torch.cuda.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            if dist.Backend.NCCL in dist.get_backend_config(group):
                group._get_backend(torch.device("cuda")).abort()
    for connection in _open_connections():
        with connection, contextlib.suppress(OSError):  # it may close while we look
            if _ends(connection) not in _quiet_sockets:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> set:
    found = set()
    for connection in _open_connections():
        with connection, contextlib.suppress(OSError):
            found.add(_ends(connection))
    return found


def _open_connections() -> Iterator[socket.socket]:
    """Duplicate this process's TCP connections, to be closed by who asked.

    Its own file descriptors tell them: the system's table of all connections takes 10 ms to read.
    """
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # it may close while we look
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                one = socket.socket(fileno=os.dup(number))
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one
                else:
                    one.close()


def _ends(connection: socket.socket) -> tuple:
    return connection.getsockname()[:2], connection.getpeername()[:2]


def describe_error(error: BaseException) -> dict:
    """Put an exception into what the kernel needs of it: kind, message, the student's lines, whose fault."""
    message = _message_of(error)
    if isinstance(error, SyntaxError) and frames.is_cell(error.filename or ""):
        message = message.replace(f'File "{error.filename}"', "cell", 1)  # its name differs from rank to rank
    lines = [
        frames.where(summary.filename, summary.lineno, summary.name)
        for summary in traceback.extract_tb(error.__traceback__)
        if frames.is_students(summary.filename)
    ]
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message
    return {
        "kind": type(error).__name__,
        "message": _readable(message),
        "lines": [line for line, _ in groupby(lines)],  # a recursion's are all the same
        "mismatch": mismatch.SIGN in message,
        "others_fault": any(sign in message for sign in _OTHERS_FAULT),
        "out_of_memory": out_of_memory,
        "held": _what_it_holds() if out_of_memory else "",
        "gpu_lost": "CUDA error" in message,
    }


def _message_of(error: BaseException) -> str:
    """Leave out the tracebacks through torch that its checkpoints tell of every rank."""
    failures = getattr(error, "failures", {}) if type(error).__name__ == "CheckpointException" else {}
    if not failures:
        return "".join(traceback.format_exception_only(error)).strip()
    told: dict[str, list[int]] = {}
    for rank, (failure, _) in sorted(failures.items()):
        told.setdefault("".join(traceback.format_exception_only(failure)).strip(), []).append(rank)
    return "CheckpointException: " + "; ".join(f"{name_ranks(ranks)}: {words}" for words, ranks in told.items())


def _what_it_holds() -> str:
    """Say in a sentence what this process holds, and what is left: of the GPU if it uses one, else of the machine."""
    if torch.cuda.is_initialized():
        free, everything = (number / 1e9 for number in torch.cuda.mem_get_info())
        held = f"Its tensors hold {torch.cuda.memory_allocated() / 1e9:.2f} GB of {everything:.2f} GB on its GPU"
        return f"{held}, where {free:.2f} GB are free."
    held, free = psutil.Process().memory_info().rss / 1e9, psutil.virtual_memory().available / 1e9
    return f"Its process holds {held:.2f} GB; this machine has {free:.2f} GB left."


def _readable(message: str) -> str:
    """Leave out torch's C++ stack and build paths."""
    message = message.split("\nException raised from ")[0]
    return message[:800]
