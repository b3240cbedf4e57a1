"""Real links between GPUs: latency, bus bandwidth, and the time of an all-reduce of 1 GB, each with its sources.

The figures are for NCCL's ring algorithm, so `formulas.ring_all_reduce_s` applies to them:

    bus bandwidth   1/β, as nccl-tests defines it (PERFORMANCE.md): the bytes per second that each GPU sends while the
                    ring is busy. Programs reach it, although the data sheet says more. The switches of NVLink 4 can
                    add up gradients themselves (NVLink SHARP). An all-reduce is then faster (480 GB/s,
                    NVIDIA/nccl-tests issue 212), but it is no longer a ring.
    α               the latency of one step of the ring. NCCL itself predicts times with a latency per step, which
                    depends on the protocol: the figures here are those of its protocol for large messages (Simple). For
                    messages of a few KB, it uses another one (LL), with 0.6 µs per step over NVLink and 2.7 µs over a
                    network.

Between hosts, the figures are those of a ring with one GPU per host, so every step crosses the network. With several
GPUs per host, most steps stay inside the host, and if a ring leaves each host over several network adapters, their
bandwidths add up, as far as NVLink allows.
"""

from dataclasses import dataclass

from shared import formulas
from shared.tables import Table

GB = 1e9
_TUNING = "NCCL, src/graph/tuning.cc, hwLatencies, Ring and Simple (commit 5067397, 2026)"


@dataclass(frozen=True)
class RealLink:
    """What connects the GPUs of a ring."""

    name: str
    gpus: int  # how many take part in the all-reduce whose time the table gives
    alpha_s: float
    bus_bytes_per_s: float
    alpha_source: str
    bandwidth_source: str

    @property
    def beta_s_per_byte(self) -> float:
        return 1 / self.bus_bytes_per_s

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        return formulas.ring_all_reduce_s(size_bytes, ranks, self.alpha_s, self.beta_s_per_byte)


REAL_LINKS = (
    RealLink(
        "NVLink 4, in a host of 8 H100",
        gpus=8,
        alpha_s=3.4e-6,
        bus_bytes_per_s=370 * GB,
        alpha_source=_TUNING,
        bandwidth_source="NVIDIA/nccl-tests issue 212 (a maintainer); NVIDIA/nccl issue 1455 measures 365 to 370",
    ),
    RealLink(
        "NVLink 3, in a host of 8 A100",
        gpus=8,
        alpha_s=3.4e-6,
        bus_bytes_per_s=232.5 * GB,
        alpha_source=_TUNING,
        bandwidth_source="NVIDIA/nccl issue 1048 (all_reduce_perf on one host)",
    ),
    RealLink(
        "8 H100 per host, 8 InfiniBand adapters of 400 Gbit/s",
        gpus=64,
        alpha_s=(7 * 3.4e-6 + 14e-6) / 8,
        bus_bytes_per_s=370 * GB,
        alpha_source=f"derived: seven steps of eight stay inside a host. {_TUNING}",
        bandwidth_source="derived: 8 adapters of 46 to 48 GB/s (NVIDIA/nccl-tests issue 290) reach NVLink's 370; "
        "NVIDIA/nccl-tests issue 283 measures about 350 on 1,984 H200, with NCCL's choice of algorithm",
    ),
    RealLink(
        "InfiniBand, 4 adapters of 200 Gbit/s per host",
        gpus=8,
        alpha_s=(3 * 3.4e-6 + 14e-6) / 4,
        bus_bytes_per_s=95.3 * GB,
        alpha_source=f"derived: three steps of four stay inside a host. {_TUNING}",
        bandwidth_source="NVIDIA/nccl-tests issue 252 (NCCL_ALGO=RING on 2 hosts of 4 H100; 1 GiB took 19.3 to "
        "20.1 ms; a maintainer: 24 GB/s per adapter)",
    ),
    RealLink(
        "InfiniBand, 1 adapter of 400 Gbit/s per host",
        gpus=8,
        alpha_s=14e-6,
        bus_bytes_per_s=47 * GB,
        alpha_source=_TUNING,
        bandwidth_source="NVIDIA/nccl-tests issue 290 (a maintainer: 46 to 48 GB/s per adapter)",
    ),
    RealLink(
        "InfiniBand, 1 adapter of 200 Gbit/s per host",
        gpus=8,
        alpha_s=14e-6,
        bus_bytes_per_s=24 * GB,
        alpha_source=_TUNING,
        bandwidth_source="NVIDIA/nccl-tests issue 119 (a maintainer); NVIDIA/nccl issue 1048 measures 24",
    ),
    RealLink(
        "InfiniBand or RoCE, 1 adapter of 100 Gbit/s per host",
        gpus=8,
        alpha_s=14e-6,
        bus_bytes_per_s=12 * GB,
        alpha_source=_TUNING,
        bandwidth_source="NVIDIA/nccl-tests issue 119 (a maintainer); NVIDIA/nccl-tests issue 29 measures 12.2",
    ),
    RealLink(
        "Ethernet with TCP, 100 Gbit/s",
        gpus=8,
        alpha_s=62e-6,
        bus_bytes_per_s=5 * GB,
        alpha_source="NVIDIA/nccl issue 1184 (Simple: 8 bytes on 2 GPUs, which are 2 steps, took 119 to 130 µs)",
        bandwidth_source="NVIDIA/nccl issue 450 (4 to 6 GB/s at best)",
    ),
    RealLink(
        "Ethernet with TCP, 10 Gbit/s",
        gpus=8,
        alpha_s=62e-6,
        bus_bytes_per_s=1.18 * GB,
        alpha_source="as for 100 Gbit/s",
        bandwidth_source="derived: of the 1538 bytes of an Ethernet frame, TCP carries 1448 (RFC 894, RFC 7323)",
    ),
)


def link_table() -> Table:
    """Show the links, with the time of an all-reduce of 1 GB."""
    rows = []
    for link in REAL_LINKS:
        figures = [f"{1e6 * link.alpha_s:.3g}", f"{link.bus_bytes_per_s / GB:g}", f"{link.gpus}"]
        rows.append([link.name, *figures, f"{1e3 * link.all_reduce_s(GB, link.gpus):,.0f}"])
    header = ["link", "α, µs per step", "bus bandwidth, GB/s", "GPUs", "all-reduce of 1 GB, ms"]
    return Table(header, rows, "The times are those of the ring's formula. shared/planner/links.py has the sources.")
