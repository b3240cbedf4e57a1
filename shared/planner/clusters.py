"""Clusters of hosts with GPUs, an estimate of the step time on them, and five situations in which to choose a strategy.

The estimate of a step contains only the terms that matter for the decision:

    computation     6 FLOPs per parameter and token, or 8 if a second forward recomputes all activations. Recomputing
                    only attention (selective checkpointing) adds little.
    communication   the bytes according to `formulas`, at 2 bytes per element, over the bandwidth of the slowest link
                    on the ring. A ring over several hosts leaves each host once, so it gets that link's full
                    bandwidth. If each host holds a copy of the model, each of its GPUs all-reduces its own gradient
                    shard in a ring of its own, so these rings share the link.
    overlap         Communication hides behind computation as far as possible, so a step takes the longer of the two.

The estimate ignores the FLOPs of attention itself, latency, the optimizer's step, and the last communication of a step,
which is always exposed.
"""

from dataclasses import dataclass

from shared import formulas
from shared.planner.shapes import SHAPES, ModelShape

GB = 1e9
TFLOPS = 1e12


@dataclass(frozen=True)
class Cluster:
    """Hosts with identical GPUs. The rates are those that programs reach, not those of the data sheet."""

    hosts: int
    gpus_per_host: int
    gpu_bytes: float
    flops: float  # per GPU and second
    inside_bytes_per_s: float  # from a GPU to the next one within a host
    between_bytes_per_s: float  # from a host to the next one, shared by its GPUs

    @property
    def gpus(self) -> int:
        return self.hosts * self.gpus_per_host


def step_seconds(
    shape: ModelShape,
    cluster: Cluster,
    stage: int,
    shard_ranks: int,
    checkpointing: str = "selective",
    micro_batch: int = 1,
) -> float:
    """Estimate the time of a step with one micro-batch per GPU, sharded over groups of shard_ranks GPUs."""
    flops_per_token = 8 if checkpointing == "full" else 6
    computing_s = flops_per_token * shape.parameters * micro_batch * shape.context / cluster.flops
    return max(computing_s, communication_seconds(shape, cluster, stage, shard_ranks))


def communication_seconds(shape: ModelShape, cluster: Cluster, stage: int, shard_ranks: int) -> float:
    """Estimate the time of a step's communication."""
    crosses_hosts = shard_ranks > cluster.gpus_per_host
    slowest_bytes_per_s = cluster.between_bytes_per_s if crosses_hosts else cluster.inside_bytes_per_s
    sharding_s = formulas.step_sent_bytes(shape.parameters, shard_ranks, stage) / slowest_bytes_per_s
    copies = cluster.gpus // shard_ranks
    shard_bytes = 2 * shape.parameters / shard_ranks
    shared_bytes_per_s = cluster.between_bytes_per_s / cluster.gpus_per_host
    return sharding_s + formulas.all_reduce_sent_bytes(shard_bytes, copies) / shared_bytes_per_s


def _a100(hosts: int, gpu_gb: float, between_gb_per_s: float) -> Cluster:
    """Return hosts with eight A100: half of their 312 bf16 TFLOP/s, two thirds of NVLink's 300 GB/s per direction."""
    return Cluster(hosts, 8, gpu_gb * GB, 156 * TFLOPS, 200 * GB, between_gb_per_s * GB)


_LLAMA_70B = SHAPES["Llama-2 70B"]

SITUATIONS: dict[str, tuple[ModelShape, Cluster]] = {
    "1.5B on a host of 8 × 80 GB": (SHAPES["GPT-2 1.5B"], _a100(1, 80, 25)),
    "7B on a host of 8 × 40 GB": (SHAPES["Llama-2 7B"], _a100(1, 40, 25)),
    "13B on 8 hosts of 8 × 40 GB, 100 Gbit/s between hosts": (SHAPES["Llama-2 13B"], _a100(8, 40, 12.5)),
    "70B on a host of 8 × 80 GB": (_LLAMA_70B, _a100(1, 80, 25)),
    "70B on 8 hosts of 8 × 80 GB, 800 Gbit/s between hosts": (_LLAMA_70B, _a100(8, 80, 100)),
}
