"""Put ranks behind a link of a known rate, a real one where the machine allows it, and say where times are measured."""

import contextlib
import os

import torch.distributed as dist

from shared import hosts, ranks
from shared.hosts import emulated
from shared.ranks import nccl

DEFAULT_RATE, DEFAULT_LATENCY_MS = "1gbit", 0.1

_emulation = contextlib.ExitStack()  # of this rank; empty while no link is emulated
_emulated = ""  # describes that link


def where() -> str:
    """Say in a few words where this process measures communication."""
    if not dist.is_initialized():
        return "in one process"
    if _emulated:
        return _emulated
    if hosts.HOST_FILE in os.environ:
        return f"behind a shaped link of {float(os.environ[hosts.HOST_BITS_PER_S]) / 1e9:g} Gbit/s"
    if _uses_nccl():
        return nccl.where()
    return f"over loopback, on {os.cpu_count()} shared cores"


def _uses_nccl() -> bool:
    return dist.is_initialized() and "nccl" in str(dist.get_backend_config())


class BehindLink(contextlib.AbstractContextManager):
    """A rank behind a link, until close() or the end of a `with` block."""

    def __init__(self):
        self.where = where()

    def close(self) -> None:
        global _emulated
        _emulation.close()
        _emulated = ""

    def __exit__(self, *error) -> None:
        self.close()

    def __str__(self) -> str:
        return self.where


def behind_link(
    rate: str = DEFAULT_RATE, latency_ms: float = DEFAULT_LATENCY_MS, ranks_per_host: int = 1
) -> BehindLink:
    """Put this rank behind a link from now on. All ranks call this together. `where` says which link it is.

    A rank that has a host of its own is behind a shaped link already. With NCCL, the ranks use their own links.
    Elsewhere, the link is emulated: an operation completes no earlier than the link would have transferred its bytes.

    Args:
        rate: Such as "1gbit".
        latency_ms: α of an emulated link. A shaped link has the latency of this machine.
        ranks_per_host: How many consecutive ranks share an emulated link.

    Raises:
        ValueError: If rate is not a rate, or not the rate of the link that this rank is behind.
    """
    global _emulated
    bits_per_s = hosts.bits_per_s(rate)
    _emulation.close()
    _emulated = ""
    if hosts.HOST_FILE in os.environ:
        if bits_per_s != float(os.environ[hosts.HOST_BITS_PER_S]):
            raise ValueError(f"this rank is {where()} already: start the ranks with link={rate!r}")
    elif not _uses_nccl():
        _emulation.enter_context(emulated.link(rate, latency_ms, ranks_per_host))
        _emulated = f"behind an emulated link of {bits_per_s / 1e9:g} Gbit/s and {latency_ms:g} ms per message"
    return BehindLink()


def start_behind_link(
    world_size: int = 4,
    rate: str = DEFAULT_RATE,
    latency_ms: float = DEFAULT_LATENCY_MS,
    *,
    emulate: bool = False,
    ranks_per_host: int = 1,
) -> None:
    """Start ranks on the CPU, each behind a link of this rate, and print which kind of link it is.

    The link is shaped by the kernel where this machine allows it, and emulated elsewhere. If the ranks have to be
    restarted, an emulated link is gone; `where` of each result says what it was measured on.

    Args:
        emulate: Emulate the link even where it could be real. It then has the given latency, which a real link of this
            machine cannot have.
        ranks_per_host: How many consecutive ranks share a host and its link. Inside a host, communication is as fast as
            this machine's loopback.
    """
    why_not = "The links are emulated." if emulate else hosts.why_not()
    link = None if why_not else rate
    ranks.start(world_size, backend="gloo:cpu", detect_mismatch=False, link=link, ranks_per_host=ranks_per_host)
    kinds = ranks.run(_behind_link, rate, latency_ms, ranks_per_host)
    if not emulate:  # otherwise the emulated link has already said what it is
        print(why_not or f"The kernel shapes the links to this rate. Times are measured {kinds[0]}.")


def _behind_link(rate: str, latency_ms: float, ranks_per_host: int) -> str:
    return behind_link(rate, latency_ms, ranks_per_host).where
