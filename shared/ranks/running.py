"""The set of ranks that runs in this notebook, if there is one."""

from shared.deadlines import scaled
from shared.ranks.errors import RanksError

DEFAULT_TIMEOUT_S = scaled(60.0)
_current = None


def find():
    """Return the `RankSet` that runs, or None."""
    return _current


def replace_by(new) -> None:
    """Remember the `RankSet` that runs from now on; None when there is none any more."""
    global _current
    _current = new


def current():
    """Return the `RankSet` that runs.

    Raises: RanksError when there are none.
    """
    if _current is None:
        raise RanksError("No ranks are running. Start them first: ranks.start(world_size=4)")
    return _current
