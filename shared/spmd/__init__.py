"""Reads the collectives of a program that is split over a mesh.

    devices = spmd.virtual_devices(32)
    spmd.of_program(jax.jit(step).lower(weights, batch).compile(), mesh)     # read from the compiled program
    spmd.of_ledger(log, {"dp": dp, "tp": tp})                                # recorded by `wire.ledger()`

Both return a list of Collectives, so that they can be compared. A collective is described as in `wire`: its *payload*
is the size of the full buffer, and *sent* is what one rank has to send for it under the ring algorithm.

A JAX program runs in the notebook's kernel, which never forks: ranks are children of the fork server, which is started
as a new program. So JAX's threads and the ranks do not affect each other (`tests/shared/test_spmd.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from shared import formulas, tables
from shared.spmd import hlo
from shared.wire import Ledger

# -- virtual devices: one process on one CPU that runs a JAX program for many devices


def virtual_devices(count: int) -> list:
    """Make JAX treat this machine's CPU as `count` devices, and return them.

    Raises:
        RuntimeError: If JAX has already started with another number of devices.
    """
    import jax  # Importing it takes a second, and most of the course does without it.

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        message = f"JAX has already started with {jax.device_count()} devices: restart the kernel to get {count}"
        raise RuntimeError(message) from None
    return jax.devices()


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        op: Its name in torch, such as "all_gather".
        axes: The axes of the mesh along which ranks take part, such as "dp", or "dp, tp" for two.
        tensors: How many tensors it sends at once.
    """

    op: str
    axes: str
    elements: int
    payload_bytes: int
    sent_bytes: float
    tensors: int = 1

    def __str__(self) -> str:
        return f"{self.op} of {self.elements:,} elements along {self.axes}"


_SENT_BYTES = {
    "all_gather": formulas.all_gather_sent_bytes,
    "all_reduce": formulas.all_reduce_sent_bytes,
    "reduce_scatter": formulas.reduce_scatter_sent_bytes,
    "all_to_all": lambda payload_bytes, ranks: formulas.ring_fraction(ranks) * payload_bytes,
    "collective_permute": lambda payload_bytes, ranks: payload_bytes,
}


def of_program(compiled, mesh) -> list[Collective]:
    """Read the collectives of a program that JAX has compiled for the devices of a mesh, in the program's order.

    One that lies inside a loop is counted once.

    Args:
        compiled: What `jax.jit(…).lower(…).compile()` returns.

    Raises:
        ValueError: If the program has a collective in a form that this function does not know.
    """
    found = []
    for each in hlo.collectives(compiled.as_text(), mesh.devices.size):
        axes = ", ".join(hlo.axes_of(each.groups, mesh.devices.shape, mesh.axis_names))
        sent_bytes = _SENT_BYTES[each.op](each.payload_bytes, len(each.groups[0]))
        found.append(Collective(each.op, axes, each.elements, each.payload_bytes, sent_bytes, each.tensors))
    return found


def of_ledger(log: Ledger, groups: Mapping[str, dist.ProcessGroup]) -> list[Collective]:
    """Return the collectives in a ledger, each with the name of the group in which it ran.

    Raises:
        ValueError: If a collective ran in none of the groups.
    """
    names = {tuple(dist.get_process_group_ranks(group)): name for name, group in groups.items()}
    found = []
    for entry in log.entries:
        if entry.group_ranks not in names:
            raise ValueError(f"{entry.op} among the ranks {entry.group_ranks} is in none of the groups {list(groups)}")
        axes = names[entry.group_ranks]
        found.append(Collective(entry.op, axes, entry.elements, entry.payload_bytes, entry.sent_bytes))
    return found


def total(collectives: Iterable[Collective]) -> float:
    """Return the bytes that a rank has to send for all of these collectives."""
    return sum(each.sent_bytes for each in collectives)


def side_by_side(columns: dict[str, list[Collective]], names: Mapping[int, str] | None = None) -> tables.Table:
    """Compare programs, one per column: what a rank sends, and then a row per kind of collective and axis.

    Args:
        names: What tensors of a size in bytes are, such as {4_194_304: "weight"}.
    """
    kinds = list(dict.fromkeys((each.axes, each.op) for column in columns.values() for each in column))
    axes = list(dict.fromkeys(axes for axes, _ in kinds))
    unit, factor = ("MB", 1e6) if max(map(total, columns.values())) >= 1e6 else ("kB", 1e3)
    rows = [["", f"a rank sends, {unit}", *(f"{total(column) / factor:.1f}" for column in columns.values())]]
    for axis, op in sorted(kinds, key=lambda kind: axes.index(kind[0])):
        same_kind = [[each for each in column if (each.axes, each.op) == (axis, op)] for column in columns.values()]
        rows.append([axis, op, *(_summary(each, factor, names or {}) for each in same_kind)])
    return tables.Table(["axis", "collective", *columns], rows, note=f"Payload of each collective, in {unit}.")


def _summary(collectives: list[Collective], factor: float, names: Mapping[int, str]) -> str:
    """Say how large these collectives are, as "4 × 16.4" or, with names, "2 × 4.2 (weight), 8.4 (2 tensors)"."""
    counts = Counter((each.payload_bytes, each.tensors) for each in collectives)
    texts = []
    for (payload_bytes, tensors), count in counts.items():
        times = f"{count} × " if count > 1 else ""
        what = f"{tensors} tensors" if tensors > 1 else names.get(payload_bytes, "")
        texts.append(f"{times}{payload_bytes / factor:.1f}" + (f" ({what})" if what else ""))
    return ", ".join(texts) or "–"
