"""Delay Ctrl-C while the kernel talks to the ranks, and handle it where it is safe to stop."""

import contextlib
import signal
import threading

_pressed: list | None = None  # inside a block, an item for each time Ctrl-C was pressed


@contextlib.contextmanager
def held():
    """Delay Ctrl-C until the block ends. Yields a function that returns whether Ctrl-C was pressed.

    Python raises KeyboardInterrupt between any two instructions, so it could cut a request to a rank in half. Code that
    waits inside the block calls the function now and then, and stops by itself. If it does not, KeyboardInterrupt is
    raised when the block ends. Outside the main thread, and in a nested block, only the function is provided.
    """
    global _pressed
    if _pressed is not None or threading.current_thread() is not threading.main_thread():
        yield lambda: bool(_pressed)
        return
    _pressed = pressed = []
    previous_handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        _pressed = None
    if pressed:
        raise KeyboardInterrupt
