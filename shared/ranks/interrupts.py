"""Hold interrupts back while the kernel talks to the ranks, and look at them where it is safe to stop."""

import contextlib
import signal
import threading

_noted: list | None = None


@contextlib.contextmanager
def held():
    """Let Ctrl-C wait until the block ends. → a function that tells whether one came

    Python raises KeyboardInterrupt between any two instructions: in the middle of a message to a rank, the rest of
    which would then be lost. Whoever waits in the block asks now and then, and stops; an interrupt that nobody
    could obey is raised when the block ends. Outside the main thread, and in a block inside a block, only asks.
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
