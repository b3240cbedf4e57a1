"""Print to any terminal: what it cannot show is replaced, and does not end the program."""

import sys


def show_anything() -> None:
    """Replace characters that the terminal's encoding lacks. Without this, printing a student's name could fail."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # A test may have replaced it.
            stream.reconfigure(errors="replace")
