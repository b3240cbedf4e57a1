"""The shell in which a rank runs cells. `await` works there. What needs a keyboard raises an error."""

import asyncio
import builtins
import contextlib
import functools
import getpass
import pdb
import sys
import types
from collections.abc import Coroutine

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets.config import Config

from shared.ranks.continued import ContinueClasses

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

    All such cells use the same event loop, because a later one may await what an earlier one made. In other cells no
    loop runs, so asyncio.run() works there.
    """
    global _cell
    _cell = _loop().create_task(coroutine)
    try:
        return _loop().run_until_complete(_cell)
    except KeyboardInterrupt:  # The cell must not continue while a later one awaits something.
        _cell.cancel()
        _loop().run_until_complete(asyncio.wait([_cell], timeout=_CANCELLED_WITHIN_S))
        raise


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


class _Unseen(DisplayHook):
    """Keeps the value of a cell's last line for the shell, and writes nothing: `rankside.run_cell` displays it."""

    def write_output_prompt(self) -> None:
        pass

    def compute_format_data(self, result) -> tuple[dict, dict]:
        return {}, {}

    def finish_displayhook(self) -> None:
        pass


class Shell(InteractiveShell):
    """IPython's shell, without a terminal, a kernel or a history on disk."""

    def __init__(self, **options):
        super().__init__(displayhook_class=_Unseen, config=Config(HistoryManager={"enabled": False}), **options)
        self.ast_transformers.append(ContinueClasses())
        self.autoawait, self.loop_runner = True, run_to_its_end

    @contextlib.contextmanager
    def _tee(self, channel: str):
        """Do nothing. IPython 9 would keep everything that cells ever printed."""
        yield

    def ask_exit(self) -> None:
        """End the cell, as sys.exit() does: `exit()` and `quit()` call this method."""
        raise SystemExit

    def enable_gui(self, gui=None) -> None:
        """Do nothing, because no window can open here. `%matplotlib inline` calls this method, too."""


def start_shell(folder: str) -> None:
    """Start this process's shell. Debuggers and input() raise an error there instead of being skipped.

    Args:
        folder: The folder for the shell's files.
    """
    Shell.instance(ipython_dir=folder, profile_dir=ProfileDir.create_profile_dir(folder))
    sys.breakpointhook = pdb.set_trace = _no_debugger
    pdb.Pdb.interaction = _no_debugger  # every other debugger in a terminal derives from this one
    builtins.input = getpass.getpass = _no_input


def _no_debugger(*_, **__) -> None:
    raise RuntimeError(_NO_DEBUGGER)


def _no_input(*_, **__) -> None:
    raise RuntimeError(_NO_INPUT)
