"""Clusters of hosts with cards, how long a step takes on one, and five situations to choose a strategy for.

A step is estimated with every term that decides, and no other:

    computing   6 flops per parameter and token, 8 where a second forward recomputes all activations; recomputing
                attention alone (selective) adds little
    sending     the bytes that `formulas` says, in 16 bit, at the rate of the slowest wire on the ring. A ring over
                several hosts leaves each host once, so it has the whole of that wire. Where each host is a copy of
                the others, its cards share the wire, each with an all-reduce of its own part of the gradients.
    together    messages hide behind computing as far as they can: a step takes the longer of the two

Not counted: attention's own flops, the latency of messages, the optimizer's step, what comes last and so is exposed.
"""

from dataclasses import dataclass

from shared import formulas
from shared.planner.shapes import SHAPES, ModelShape

GB = 1e9
TFLOPS = 1e12


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal cards. Rates are what is reached in practice, not what is printed on the box."""

    hosts: int
    cards_per_host: int
    card_bytes: float
    flops: float  # per card and second
    inside_bytes_per_s: float  # from a card to the next one, inside a host
    between_bytes_per_s: float  # from a host to the next one, shared by its cards

    @property
    def cards(self) -> int:
        return self.hosts * self.cards_per_host


def step_seconds(
    shape: ModelShape,
    cluster: Cluster,
    stage: int,
    shard_ranks: int,
    checkpointing: str = "selective",
    micro_batch: int = 1,
) -> float:
    """Estimate a step of one micro-batch per card at a ZeRO stage, sharded over groups of shard_ranks cards."""
    flops_each = 8 if checkpointing == "full" else 6
    computing_s = flops_each * shape.parameters * micro_batch * shape.context / cluster.flops
    return max(computing_s, sending_seconds(shape, cluster, stage, shard_ranks))


def sending_seconds(shape: ModelShape, cluster: Cluster, stage: int, shard_ranks: int) -> float:
    """Estimate how long a step's messages take."""
    leaves_host = shard_ranks > cluster.cards_per_host
    slowest = cluster.between_bytes_per_s if leaves_host else cluster.inside_bytes_per_s
    inside_s = formulas.step_sent_bytes(shape.parameters, shard_ranks, stage) / slowest
    copies = cluster.cards // shard_ranks
    part_bytes = 2 * shape.parameters / shard_ranks
    shared_rate = cluster.between_bytes_per_s / cluster.cards_per_host
    return inside_s + formulas.all_reduce_sent_bytes(part_bytes, copies) / shared_rate


def _a100(hosts: int, card_gb: float, between_gb_per_s: float) -> Cluster:
    """Make hosts of eight A100: half of their 312 bf16 TFLOP/s, two thirds of NVLink's 300 GB/s in a direction."""
    return Cluster(hosts, 8, card_gb * GB, 156 * TFLOPS, 200 * GB, between_gb_per_s * GB)


_LLAMA_70B = SHAPES["Llama-2 70B"]

SITUATIONS: dict[str, tuple[ModelShape, Cluster]] = {
    "1.5B on a host of 8 × 80 GB": (SHAPES["GPT-2 1.5B"], _a100(1, 80, 25)),
    "7B on a host of 8 × 40 GB": (SHAPES["Llama-2 7B"], _a100(1, 40, 25)),
    "13B on 8 hosts of 8 × 40 GB, 100 Gbit/s between": (SHAPES["Llama-2 13B"], _a100(8, 40, 12.5)),
    "70B on a host of 8 × 80 GB": (_LLAMA_70B, _a100(1, 80, 25)),
    "70B on 8 hosts of 8 × 80 GB, 800 Gbit/s between": (_LLAMA_70B, _a100(8, 80, 100)),
}
