"""Write a page that is made from other files of the course, or say whether it is out of date."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from shared.checks.terminal import show_anything


class PageError(ValueError):
    """The page cannot be made, for example because two lessons define the same term."""


def main(path: Path, make: Callable[[], str], module: str, description: str) -> int:
    """Write the page to path if it has changed. With the option `--check`, only say whether it is up to date.

    Args:
        make: Returns the page's text, or raises PageError.
        module: The module to run, such as "instructor.glossary".
        description: What the module does, in one line.

    Returns:
        The exit status: 1 if the page cannot be made, or if `--check` finds that it is out of date.
    """
    show_anything()
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    try:
        text = make()
    except PageError as error:
        print(f"{path.name} cannot be built: {error}.", file=sys.stderr)
        return 1
    is_current = path.exists() and path.read_text(encoding="utf-8") == text
    if options.check:
        print(f"{path.name} is up to date." if is_current else f"out of date: {path.name}")
        return 0 if is_current else 1
    if not is_current:
        print(f"building {path.name}")
        path.write_text(text, encoding="utf-8")
    return 0
