"""Start, heal and stop a set of ranks from a notebook, and run things on all of them.

    from shared import ranks
    ranks.start(world_size=4)        # four processes, one process group; `%%ranks` cells run on them
    ranks.run(fn, *args)             # fn(*args) on every rank → results in rank order
    ranks.pull("loss")               # a variable of every rank → values in rank order
    ranks.stop()

A rank is an ipyparallel engine: a process that keeps its variables from cell to cell. The notebook's
kernel hosts the TCPStore through which the ranks meet. Every wait has a deadline. When a cell fails,
hangs or is interrupted, the doctor says why, the process group is replaced, and the next cell works.
"""

import contextlib

from shared.ranks import running
from shared.ranks.devices import check_link, check_world_size, place
from shared.ranks.errors import CellFailed, RanksError
from shared.ranks.running import DEFAULT_TIMEOUT_S, current

__all__ = ["CellFailed", "RanksError", "current", "pull", "run", "start", "stop", "world"]


def start(
    world_size: int = 4, *, backend: str | None = None, detect_mismatch: bool = True, link: str | None = None
) -> None:
    """Start world_size ranks, and show where each one lives and what can be measured there.

    Ranks that already run are kept, variables and all, if there are as many as asked for.

    backend: "nccl", "gloo" or "gloo:cpu"; by default what fits the machine (or RANKS_BACKEND says).
    detect_mismatch: compare each collective's op, shape and dtype over all ranks before it runs. It
        costs messages of its own: turn it off where a cell measures time.
    link: a rate such as "1gbit": each rank is a host of its own, and what it sends, and what it receives, passes a
        link of that rate. A host reaches the other hosts and nothing else, so fetch data before. See `shared/hosts`.
    Raises: ValueError for a world size, backend or link that this machine cannot serve; RanksError when the
        ranks do not come up.
    """
    # Imported here: a rank and the fork server import this package too, and do without IPython and ipyparallel.
    from shared.ranks import magic
    from shared.ranks.rankset import RankSet

    check_world_size(world_size)
    asked_for = (world_size, backend, detect_mismatch, link)
    before = running.find()
    if before is not None and before.whole and before.asked_for == asked_for:
        magic.show_table(before, note="These ranks were running already: their variables are kept.")
        return
    check_link(link)
    if before is not None:
        place(world_size, backend, link)  # a refusal comes before the ranks that run are ended
    stop()
    with magic.progress(world_size) as report:
        running.replace_by(RankSet(world_size, backend, detect_mismatch, link, report))
    magic.register()
    magic.show_table(current())


def run(fn, *args, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs) -> list:
    """Call fn(*args, **kwargs) on every rank. → results in rank order

    What fn prints is shown in rank order, equal outputs merged.
    Raises: CellFailed when a rank fails, dies or hangs.
    """
    from shared.ranks import magic, rankside

    outcomes = current().run(rankside.call, (fn, args, kwargs), timeout_s=timeout_s, show=magic.show)
    return [outcome.value for outcome in outcomes]


def pull(name: str) -> list:
    """Fetch a variable from every rank. → values in rank order"""
    from shared.ranks import rankside

    return [o.value for o in current().run(rankside.call, (rankside.lookup, (name,), {}))]


def stop() -> None:
    """End the ranks and everything they started. Harmless when none run."""
    if (ranks := running.find()) is not None:
        ranks.close()
        running.replace_by(None)


@contextlib.contextmanager
def world(size: int):
    """Inside the block, the process group holds only the first `size` ranks, and the rest stand by.

    A lab's check uses it to try world sizes 1, 2, 3 and 4 on the same four processes.
    """
    ranks = current()
    everyone = list(range(ranks.world_size))
    try:
        ranks.regroup(list(range(size)))
        yield
    finally:
        if ranks.alive:
            ranks.regroup(everyone)
        ranks.members = everyone  # for the restart that an interrupt leaves to the next cell
