"""The set of ranks that is running in this notebook, if there is one."""

from shared.deadlines import scaled
from shared.ranks.errors import RanksError

DEFAULT_TIMEOUT_S = scaled(60.0)
_current = None


def find():
    """Return the running `RankSet`, or None."""
    return _current


def set_current(new) -> None:
    """Remember the running `RankSet`, or None after the ranks have stopped."""
    global _current
    _current = new


def current():
    """Return the running `RankSet`.

    Raises:
        RanksError: If no ranks are running.
    """
    if _current is None:
        raise RanksError(
            "No ranks are running. In a notebook, run its first cells, which start them. Elsewhere, call "
            "ranks.start(world_size=4)"
        )
    return _current
