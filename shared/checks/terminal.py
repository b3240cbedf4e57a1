"""Print to any terminal: what it cannot show is replaced, and does not end the program."""

import io
import sys


def show_anything() -> None:
    """Replace characters that the terminal's encoding lacks. Without this, printing a student's name could fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # A test may have replaced it.
            stream.reconfigure(errors="replace")
