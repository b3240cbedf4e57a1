"""What a cell does interactively: `await` works on a rank, and what needs a keyboard says what to do instead."""

import asyncio
import builtins
import functools
import getpass
import pdb
import sys
import types
from collections.abc import Coroutine

_NO_DEBUGGER = (
    "A debugger cannot stop a rank, because nobody can type there. Print what you want to see, or run the code in an "
    "ordinary cell, without %%ranks."
)
_NO_INPUT = (
    "A rank cannot ask for input, because nobody can type there. Write the answer into the cell, or ask for it in an "
    "ordinary cell and pass it on with ranks.run()."
)
_CANCELLED_WITHIN_S = 0.5
_cell: asyncio.Task | None = None  # the latest cell that awaited something


def run_to_its_end(coroutine: Coroutine):
    """Return the result of a cell that awaits something at its top level.

    The process's own event loop is running, because it has called this cell. Another loop can run only while asyncio
    does not know about it. It is the same loop for all cells, because a later cell may await what an earlier one made.
    """
    global _cell
    outer = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        _cell = _loop().create_task(coroutine)
        return _loop().run_until_complete(_cell)
    except KeyboardInterrupt:  # The cell must not continue while a later one awaits something.
        if _cell is not None:
            _cell.cancel()
            _loop().run_until_complete(asyncio.wait([_cell], timeout=_CANCELLED_WITHIN_S))
        raise
    finally:
        asyncio._set_running_loop(outer)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def suspended_frames() -> list[types.FrameType]:
    """Return the frames of a cell that awaits something, innermost first. They are not in the stack of its thread."""
    frames, awaited = [], _cell.get_coro() if _cell is not None and not _cell.done() else None
    while isinstance(awaited, types.CoroutineType) and awaited.cr_frame is not None:
        frames.insert(0, awaited.cr_frame)
        awaited = awaited.cr_await
    return frames


def prepare(shell) -> None:
    """Let cells of this shell await, and let debuggers and questions fail instead of being skipped."""
    shell.autoawait, shell.loop_runner = True, run_to_its_end
    sys.breakpointhook = pdb.set_trace = _no_debugger
    pdb.Pdb.interaction = _no_debugger  # every other debugger in a terminal derives from this one
    builtins.input = getpass.getpass = _no_input


def _no_debugger(*_, **__) -> None:
    raise RuntimeError(_NO_DEBUGGER)


def _no_input(*_, **__) -> None:
    raise RuntimeError(_NO_INPUT)
