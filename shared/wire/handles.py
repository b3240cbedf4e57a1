"""Watches the handles of isend and irecv: which one a thread waits for, and which ones are dropped.

gloo may never complete a transfer whose handle was dropped before anything has waited for it. The rank that depends on
it hangs, perhaps in a later call that is correct.
"""

import threading
import weakref

import torch.distributed as dist

from shared.wire import completion, instrumentation

_original_wait = dist.Work.wait
_in_flight: dict[int, tuple] = {}  # id of a Work → (a weak reference to it, its Call)
_waiting: dict[int, instrumentation.Call] = {}  # thread → the Call of the handle that it waits for
dropped: list = []  # the Calls whose handles were dropped


def install() -> None:
    """Watch the handles of this process's transfers from now on."""
    for name in ("send", "recv", "recv_anysource"):
        setattr(dist.ProcessGroup, name, _watched(getattr(dist.ProcessGroup, name)))
    dist.Work.wait = completion.usual_wait = _noted_wait  # pyright: ignore[reportAttributeAccessIssue] (a patch)


def reset() -> None:
    """Forget all handles, because a new process group has no transfers yet."""
    _in_flight.clear()
    dropped.clear()


def waited(work) -> None:
    """Note that somebody waits for this handle."""
    _in_flight.pop(id(work), None)


def waits_for(thread: int | None) -> instrumentation.Call | None:
    """Return the Call of the handle that a thread waits for right now, if this is known."""
    return None if thread is None else _waiting.get(thread)


def _watched(launch):
    def launch_and_watch(group, *args, **kwargs):
        work = launch(group, *args, **kwargs)
        if work is not None and not instrumentation.host_runs_ahead():  # NCCL completes what it has launched
            index, call = id(work), instrumentation.last_call
            _in_flight[index] = weakref.ref(work, lambda _: _drop(index, call)), call
        return work

    return launch_and_watch


def _drop(index: int, call) -> None:
    """Note a handle that was dropped, unless it was waited for."""
    if _in_flight.get(index, (None, None))[1] is call:
        del _in_flight[index]
        dropped.append(call)


def _noted_wait(work, *args, **kwargs) -> bool:
    _, call = _in_flight.pop(id(work), (None, None))
    if call is None:
        return _original_wait(work, *args, **kwargs)
    thread = threading.get_ident()
    _waiting[thread] = call
    try:
        return _original_wait(work, *args, **kwargs)
    finally:
        del _waiting[thread]
