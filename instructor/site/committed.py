"""The notebooks as they were committed. Whoever has used a notebook finds their own code and runs in its file."""

import subprocess

from instructor.build import ROOT


def text(path: str) -> str:
    """Return a file of the course from the last commit, or as it is on disk if git has no commit of it."""
    shown = _git("show", f"HEAD:./{path}")
    return shown if shown is not None else (ROOT / path).read_text(encoding="utf-8")


def changed(paths: list[str]) -> list[str]:
    """Return the files that have changed since the last commit."""
    listed = _git("diff", "--name-only", "--relative", "HEAD", "--", *paths)
    return (listed or "").splitlines()


def _git(*arguments: str) -> str | None:
    """Return what git prints, or None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
