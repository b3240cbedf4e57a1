"""Start, repair and stop a set of ranks from a notebook, and run code on all of them.

    from shared import ranks
    ranks.start(world_size=4)        # four processes in one process group; `%%ranks` cells run on them
    ranks.run(fn, *args)             # calls fn(*args) on every rank, returns the results in rank order
    ranks.pull("loss")               # returns a variable's value on every rank, in rank order
    ranks.stop()

A rank is a process that keeps its variables from cell to cell. The fork server starts it (forkserver.py), and the
notebook's kernel sends cells to it over a connection of its own (lines.py). The kernel hosts the TCPStore through which
the ranks form a process group. Every wait has a deadline. When a cell fails, hangs or is interrupted, the doctor
explains why, the ranks form a new process group, and the next cell works.
"""

import contextlib

from shared.ranks import folders, running  # folders comes first, because it changes the path
from shared.ranks.devices import check_container, check_link, check_open_files, check_world_size, place
from shared.ranks.errors import CellFailed, RanksError
from shared.ranks.running import DEFAULT_TIMEOUT_S, current

__all__ = ["CellFailed", "RanksError", "current", "pull", "run", "start", "stop", "world"]


def start(
    world_size: int = 4,
    *,
    backend: str | None = None,
    detect_mismatch: bool = True,
    link: str | None = None,
    simulate: str | None = None,
    ranks_per_host: int = 1,
) -> None:
    """Start world_size ranks, and show where each one runs and what can be measured there.

    If the same number of ranks is already running with the same options, the ranks and their variables are kept.

    Args:
        backend: "nccl" gives each rank a GPU of its own. "nccl:shared" lets up to four ranks share a GPU, and needs
            NCCL 2.30 or later. "gloo:cpu" uses no GPU. With "gloo", ranks share GPUs, but can only run collectives
            there. The default is the environment variable RANKS_BACKEND. If it is not set, this function tries "nccl",
            "nccl:shared" and "gloo:cpu" in this order, and uses the first one that works on this machine.
        detect_mismatch: Compare each collective's operation, shape and dtype over all ranks before it runs. This costs
            extra communication, so turn it off where a cell measures time.
        link: A rate such as "1gbit". Each rank then runs on its own host, behind a link of that rate in both
            directions. A host can reach only the other hosts, so download any data beforehand. See `shared/hosts`.
        simulate: "nccl" to make gloo behave toward the host as NCCL does, so that bugs that gloo hides are reported.
            See `shared/wire/simulated_nccl`. The default is the environment variable RANKS_SIMULATE.
        ranks_per_host: How many consecutive ranks share a host and its link, if there is a link. Inside a host, they
            communicate over loopback.

    Raises:
        ValueError: If this machine cannot run that world size, backend or link, or if ranks_per_host does not divide
            the ranks.
        RanksError: If the ranks do not start.
    """
    folders.check_installed("torch", "IPython", "cloudpickle", "jinja2")
    # Imported here because ranks and the fork server import this package without IPython.
    from shared.ranks import magic
    from shared.ranks.rankset import RankSet

    check_world_size(world_size)
    if ranks_per_host < 1 or world_size % ranks_per_host:
        raise ValueError(f"ranks_per_host must divide the {world_size} ranks, got {ranks_per_host}")
    options = (world_size, backend, detect_mismatch, link, simulate, ranks_per_host)
    before = running.find()
    if before is not None and before.whole and before.options == options:
        magic.show_table(before, note="These ranks were already running, and their variables are kept.")
        return
    check_link(link)
    check_container()
    check_open_files(world_size)
    if before is not None:
        place(world_size, backend, link, simulate)  # if this raises, the running ranks are not stopped
    stop()
    with magic.progress(world_size) as report:
        running.set_current(RankSet(*options, report))
    magic.register()
    magic.show_table(current())


def run(fn, *args, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs) -> list:
    """Call fn(*args, **kwargs) on every rank, and return the results in rank order.

    What fn prints is shown in rank order, with equal outputs merged.

    Raises:
        CellFailed: If a rank raises, dies or hangs.
    """
    from shared.ranks import magic, rankside

    outcomes = current().run(rankside.call, (fn, args, kwargs), timeout_s=timeout_s, show=magic.show)
    return [outcome.value for outcome in outcomes]


def pull(name: str) -> list:
    """Return the value of a variable on every rank, in rank order."""
    from shared.ranks import rankside

    return [o.value for o in current().run(rankside.call, (rankside.lookup, (name,), {}))]


def stop() -> None:
    """Stop the ranks and every process they started. Do nothing if no ranks are running."""
    if (ranks := running.find()) is not None:
        ranks.close()
        running.set_current(None)


@contextlib.contextmanager
def world(size: int):
    """Form a process group of only the first `size` ranks inside the block; the others stay idle.

    A lab's checks use this to try world sizes 1, 2, 3 and 4 on the same four processes.
    """
    ranks = current()
    all_ranks = list(range(ranks.world_size))
    try:
        ranks.regroup(list(range(size)))
        yield
    finally:
        if ranks.alive:
            ranks.regroup(all_ranks)
        ranks.members = all_ranks  # after an interrupt, the next cell restarts these ranks
