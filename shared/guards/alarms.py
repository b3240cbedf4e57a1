"""Errors that every rank raises: those of models that differ, and problems that one rank has found.

[Note: raising on every rank]
A rank that finds a problem in a step cannot just raise an error, because the others would wait for it in a collective.
So it first writes the problem to the store of the process group. Then it takes part in the collectives of this step,
but sends NaN, and raises. A rank that finds NaN at the beginning of a mean reads the store. If a problem is there, the
rank raises it, too. Without NaN, nobody has to ask. A NaN that was computed is passed on, as in one process.
"""

import contextlib
import math
import os
import zlib
from collections.abc import Callable
from itertools import zip_longest

import torch
import torch.distributed as dist

SAME_LAYERS = "Build and freeze the same layers on all ranks, in the same order"


_LOST = (
    "gloo/",
    "Timed out waiting",
    "pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
)  # gloo's


def as_a_wait(error: RuntimeError, group: dist.ProcessGroup | None, what: str, advice: str) -> RuntimeError:
    """Return an error that says what this rank has waited for, if a collective has failed without another rank.

    torch's error, at the deadline of the process group or when another rank ends, does not say it. Any other error is
    returned as it is.
    """
    text = str(error)
    is_lost = isinstance(error, dist.DistBackendError) or any(words in text for words in _LOST)
    if "has waited for" in text or not is_lost:
        return error
    reason = text.rsplit("] ", 1)[-1].strip()
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    named = RuntimeError(f"rank {rank} has waited for {what}, which did not come ({reason}): {advice}")
    named.__cause__ = error
    return named


@contextlib.contextmanager
def naming_the_wait(group: dist.ProcessGroup | None, what: Callable[[], str], advice: str):
    """Let a collective in the with-block raise as_a_wait()."""
    try:
        yield
    except RuntimeError as error:
        raise as_a_wait(error, group, what(), advice)  # noqa: B904, because it has its cause already


class Alarm:
    """Lets all ranks of a group raise an error.

    `gathers` counts the collectives of this process that the ledger does not see.
    """

    gathers = 0

    def __init__(self, group: dist.ProcessGroup | None = None):
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group: wrap the module only on the ranks of its group")
        self.group, self.device, self.key = group, torch.device("cpu"), ""  # the device and key follow in compare()

    @property
    def store(self) -> dist.Store | None:
        """The ranks' store, or None if there is only one process that pretends to be many."""
        return None if dist.get_backend(self.group) == "fake" else dist.distributed_c10d._get_default_store()

    def compare(
        self, described: list[str], device: torch.device, what: str = "models", advice: str = SAME_LAYERS
    ) -> None:
        """Raise a ValueError on every rank if their models are not described by the same lines.

        Args:
            described: The lines.
            device: The device of the backend that sends them.
            what: What they describe, if it is no model.
            advice: What to do if they differ, as a sentence without its period.

        Communication: one all-gather of two integers, which the ledger does not see.
        """
        self.device = device
        if (store := self.store) is None:
            return
        text, rank = "\n".join(described), dist.get_rank(self.group)
        pairs = self.gather([zlib.crc32(text.encode()), int.from_bytes(os.urandom(6))], device)
        checksums, key = {checksum for checksum, _ in pairs}, f"guards/{pairs[0][1]}"
        self.key = self.key or key
        if len(checksums) == 1:
            return
        store.set(f"{key}/{rank}", text)
        for other in range(len(pairs)):
            others = store.get(f"{key}/{other}").decode().split("\n")
            if others != described:
                different = [pair for pair in zip_longest(described, others, fillvalue="nothing") if len({*pair}) > 1]
                mine, theirs = map(list, zip(*different[:3], strict=True))
                raise ValueError(
                    f"the ranks' {what} differ: rank {rank} has {mine} where rank {other} has {theirs}. {advice}"
                )

    def gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        """Return every rank's integers, by a call of the backend, so that the ledger shows only a wrapper's own."""
        if self.store is None:
            return [numbers]
        Alarm.gathers += 1
        mine = torch.tensor(numbers, device=device)
        received = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        backend = (self.group or dist.distributed_c10d._get_default_group())._get_backend(device)
        backend.allgather([received], [mine]).wait()  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)
        return [pair.tolist() for pair in received]

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank what one of them has found. All ranks must call this.

        Communication: one all-gather of an integer, which the ledger does not see.
        """
        if self.device.type == "cpu" and (store := self.store) is not None:
            if error is not None:
                store.set(self.key, f"rank {dist.get_rank(self.group)}: {error}")
            found = [count for (count,) in self.gather([int(error is not None)], self.device)]
            if error is None and any(found):
                error = RuntimeError(store.get(self.key).decode())
        if error is not None:
            raise error

    def ring(self, error: Exception, send_nan: Callable[[], None]) -> None:
        """Raise an error that this rank has found, and let the others raise it.

        Args:
            send_nan: takes part in the collectives in which the other ranks wait, and sends NaN.
        """
        if self.device.type == "cpu" and (store := self.store) is not None:
            store.set(self.key, f"rank {dist.get_rank(self.group)}: {error}")
            store.get(self.key)  # set() returns before the value is there
            with contextlib.suppress(RuntimeError), torch.no_grad():
                send_nan()
        raise error

    def listen(self, mean: torch.Tensor | None) -> None:
        """Raise a problem of another rank, if it is the reason why this mean begins with NaN."""
        if mean is None or not mean.is_cpu or not mean.numel():
            return
        first = mean[(0,) * mean.dim()].item()
        if math.isnan(first.real) and (store := self.store) is not None and store.check([self.key]):
            raise RuntimeError(store.get(self.key).decode())
