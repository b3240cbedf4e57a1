"""Delay Ctrl-C while the kernel talks to the ranks, and handle it where it is safe to stop."""

import contextlib
import signal
import threading

_noted: list | None = None


@contextlib.contextmanager
def held():
    """Delay Ctrl-C until the block ends. Yields a function that tells whether Ctrl-C was pressed.

    Python raises KeyboardInterrupt between any two instructions, so it could cut a request to a rank in half. Code that
    waits inside the block calls the function now and then, and stops by itself. If it does not, KeyboardInterrupt is
    raised when the block ends. Outside the main thread, and in a nested block, only the function is provided.
    """
    global _noted
    if _noted is not None or threading.current_thread() is not threading.main_thread():
        yield lambda: bool(_noted)
        return
    _noted = came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
        _noted = None
    if came:
        raise KeyboardInterrupt
