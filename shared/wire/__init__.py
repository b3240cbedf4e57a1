"""The wire ledger: every collective and point-to-point operation of this rank, in order, with its bytes and times.

    with wire.ledger() as log:
        loss.backward()
    log.table()

The ledger records every call that the dispatcher hooks see (see `instrumentation.py`): your own calls, and those of
DDP's reducer, FSDP2 and DTensor.

Two columns count bytes. *Payload* is the size of the full buffer. *Sent* is what this rank has to send under the ring
algorithm, whatever the backend really does. In addition, `carried_bytes` is what the network interface counted while
the ledger was open. Ranks on one machine share an interface, so it covers all of them. A rank on its own host (see
`shared/hosts`) has its own interface.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shared import formulas, tables
from shared.wire import completion, frames, instrumentation, intervals, sockets

# A call belongs to the family with which its name begins.
_FAMILIES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass
class Entry:
    """One collective or point-to-point operation on this rank, from its launch to its completion."""

    op: str
    number: int
    group: str
    group_ranks: tuple[int, ...]
    partner: int | None
    dtype: str
    elements: int
    payload_bytes: int
    sent_bytes: float
    is_async: bool
    in_backward: bool
    line: str
    launched_s: float  # on this machine's monotonic clock, which all its ranks share
    completed_s: float | None = None  # None if it was in flight when the ledger ended, or nothing here waits for it
    in_flight: bool = False  # whether it had certainly not finished when the ledger ended

    @property
    def took_ms(self) -> float | None:
        return None if self.completed_s is None else 1e3 * (self.completed_s - self.launched_s)


@dataclass
class Ledger:
    """Everything that one rank sent and received while the ledger was open."""

    rank: int | None
    entries: list[Entry] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # when this rank was blocked in a wait
    opened_s: float = 0.0
    closed_s: float | None = None
    carried_bytes: int | None = None  # None if the system does not count it
    is_simulated: bool = False  # over simulated NCCL, whose times mean nothing

    @property
    def messages(self) -> int:
        return len(self.entries)

    @property
    def ops(self) -> dict[str, int]:
        """Count how often each operation was launched."""
        return dict(Counter(entry.op for entry in self.entries))

    @property
    def payload_bytes(self) -> int:
        return sum(entry.payload_bytes for entry in self.entries)

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has to send under the ring algorithm."""
        return sum(entry.sent_bytes for entry in self.entries)

    def sent_mb_to(self, ranks: int) -> list[float]:
        """Return how many megabytes this rank sent to each of so many ranks in point-to-point messages."""
        sent_mb = [0.0] * ranks
        for entry in self.entries:
            if entry.op == "send" and entry.partner is not None:
                sent_mb[entry.partner] += entry.payload_bytes / 1e6
        return sent_mb

    @property
    def total_ms(self) -> float:
        """Time during which at least one collective was in flight."""
        ended = [(each.launched_s, each.completed_s) for each in self.entries if each.completed_s is not None]
        return 1e3 * intervals.length_s(ended)

    def summary(self) -> str:
        """Summarize the ledger in one line. It contains no times, so ranks that did the same get the same line."""
        if not self.entries:
            return "no communication"
        kinds = ", ".join(f"{count} {op}" for op, count in self.ops.items())
        return f"{kinds} │ payload {_bytes(self.payload_bytes)} │ must send {_bytes(self.sent_bytes)}"

    def table(self, times: bool = True, most_rows: int = 10) -> tables.Table:
        """Show the first entries and the totals of all entries.

        Args:
            times: Include the columns that differ from run to run.
            most_rows: The number of entries to show.
        """
        shown = self.entries[:most_rows]
        columns = {
            "#": [str(index) for index in range(1, len(shown) + 1)],
            "op": [_with_partner(entry) for entry in shown],
            "ranks": [", ".join(map(str, entry.group_ranks)) if entry.partner is None else "" for entry in shown],
            "dtype": [entry.dtype for entry in shown],
            "elements": [f"{entry.elements:,}" for entry in shown],
            "payload": [_bytes(entry.payload_bytes) for entry in shown],
            "must send": [_bytes(entry.sent_bytes) for entry in shown],
            "async": ["yes" if entry.is_async else "no" for entry in shown],
            "at ms": [f"{1e3 * (entry.launched_s - self.opened_s):.2f}" for entry in shown],
            "took ms": [_duration(entry) for entry in shown],
            "launched by": [entry.line for entry in shown],
        }
        totals = {"op": f"{self.messages} in total", "payload": _bytes(self.payload_bytes)}
        totals |= {"must send": _bytes(self.sent_bytes), "took ms": f"{self.total_ms:.2f}"}
        hidden = set() if times else {"at ms", "took ms"}
        if len({entry.group_ranks for entry in self.entries}) < 2:
            hidden.add("ranks")
        header = [name for name in columns if name not in hidden]
        rows = [list(row) for row in zip(*(columns[name] for name in header), strict=True)]
        if self.messages > most_rows:
            rows.append(
                ["…" if name == "#" else f"{self.messages - most_rows} more" if name == "op" else "" for name in header]
            )
        rows.append([totals.get(name, "") for name in header])
        note = "" if self.rank is None else f"The ledger of rank {self.rank}."
        if self.is_simulated and times:
            note += " NCCL is simulated, so the times mean nothing."
        return tables.Table(header, rows, note=note.strip())

    def assert_volume(
        self,
        *,
        messages: int | None = None,
        ops: dict[str, int] | None = None,
        payload_bytes: float | None = None,
        sent_bytes: float | None = None,
    ) -> None:
        """Compare the ledger with what a formula predicts. Arguments that are None are not compared.

        Raises:
            AssertionError: If a value differs. The message states the expected and the actual value.
        """
        pairs = {
            "messages": (self.messages, messages),
            "operations": (self.ops, ops),
            "payload bytes": (self.payload_bytes, payload_bytes),
            "bytes to send": (self.sent_bytes, sent_bytes),
        }
        differences = [
            f"{name}: expected {expected}, got {actual}"
            for name, (actual, expected) in pairs.items()
            if not _same(actual, expected)
        ]
        if differences:
            raise AssertionError(f"The wire ledger of rank {self.rank} is not as expected. " + "; ".join(differences))


@contextlib.contextmanager
def ledger():
    """Record every collective that this rank launches inside the block. Yields a Ledger.

    Times are filled in when the block ends. Over NCCL, they are the GPU's, and the end of the block waits until the
    current stream has caught up (see `completion.py`). An operation that completes later has no completion time, and
    the table says that it had not finished: nothing has waited for it.
    Ledgers may be nested: each one records everything that is launched while it is open. Without a process group, there
    is nothing to record.
    """
    instrumentation.install()
    log = Ledger(dist.get_rank() if dist.is_initialized() else None)
    with completion.watching() as watcher:
        log.opened_s, log.waits, carried = watcher.clock.began_s, watcher.waits, sockets.counters()

        log.is_simulated = instrumentation.simulation is not None

        def launched(call: instrumentation.Call, work, tensors: list[torch.Tensor]) -> None:
            entry = _entry_of(call)
            log.entries.append(entry)
            watcher.watch(work, entry, tensors)

        with instrumentation.listening(launched, watcher.waiting):
            try:
                yield log
                instrumentation.synchronize()
            finally:
                log.closed_s = watcher.clock.seconds(watcher.clock.mark())
                if carried is not None and (now := sockets.counters()) is not None:
                    log.carried_bytes = now.sent_bytes - carried.sent_bytes


def sent_bytes_of(call: instrumentation.Call, rank: int) -> float:
    """Return the bytes that a rank sends for a collective under the ring algorithm.

    A broadcast or reduce passes the buffer along a chain. Gather, scatter and all-to-all send each slice directly to
    its rank. For a point-to-point operation, only the sender sends.

    Source: nccl-tests PERFORMANCE.md.
    """
    payload_bytes, world_size = call.payload_bytes, len(call.group_ranks)
    match _family(call.op):
        case "all_reduce":
            return formulas.all_reduce_sent_bytes(payload_bytes, world_size)
        case "all_gather":
            return formulas.all_gather_sent_bytes(payload_bytes, world_size)
        case "reduce_scatter":
            return formulas.reduce_scatter_sent_bytes(payload_bytes, world_size)
        case "all_to_all":
            return payload_bytes - call.kept_bytes
        case "broadcast":  # the chain starts at the root, and its last rank sends nothing
            chain_index = (call.group_ranks.index(rank) - call.group_ranks.index(call.root)) % world_size
            return payload_bytes if chain_index < world_size - 1 else 0
        case "reduce":
            return payload_bytes if rank != call.root else 0
        case "gather":
            return payload_bytes / world_size if rank != call.root else 0
        case "scatter":
            return formulas.ring_fraction(world_size) * payload_bytes if rank == call.root else 0
        case "send":
            return payload_bytes
    return 0


def _family(op: str) -> str:
    return next((family for family in _FAMILIES if op.startswith(family)), op)


def _entry_of(call: instrumentation.Call) -> Entry:
    return Entry(
        op=_family(call.op),
        number=call.number,
        group=call.group_name,
        group_ranks=call.group_ranks,
        partner=call.partner,
        dtype=call.dtype,
        elements=call.payload_bytes // getattr(torch, call.dtype).itemsize,
        payload_bytes=call.payload_bytes,
        sent_bytes=sent_bytes_of(call, dist.get_rank()),
        is_async=call.is_async,
        in_backward=call.in_backward,
        line=frames.where(*call.called_from) if call.called_from else "",
        launched_s=call.launched_s,
    )


# -- formatting


def _with_partner(entry: Entry) -> str:
    if entry.partner is None:
        return entry.op
    return f"{entry.op} {'to' if entry.op == 'send' else 'from'} {entry.partner}"


def _duration(entry: Entry) -> str:
    """Format how long an operation took. If its completion was not reported, the duration is unknown."""
    if entry.took_ms is None:
        return "not finished" if entry.in_flight else "–"
    return f"{entry.took_ms:.2f}"


def _bytes(count: float) -> str:
    """Format a byte count as 1,234 B, 12.3 KB or 4.57 MB, in powers of 1000."""
    if count < 10_000:
        return f"{count:,.0f} B"
    for unit, size in (("KB", 1e3), ("MB", 1e6)):
        if count < 1000 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e9:.3g} GB"


def _same(actual, expected) -> bool:
    if expected is None or actual == expected:
        return True
    return not isinstance(expected, dict) and abs(actual - expected) <= 1e-9 * abs(expected)
