"""What one long sequence keeps on each GPU, and what attention sends if several ranks share the sequence.

Keys and values have `kv_heads / heads` of the width of the queries (grouped-query attention). All estimates count a
single sequence, activations in 16 bits, an attention kernel that keeps no scores, and no dropout. The activations of a
layer are those of the formula in `formulas.activation_bytes`, whose MLP has the width 4h.
"""

from dataclasses import dataclass, replace

from shared import formulas
from shared.planner.links import REAL_LINKS, RealLink
from shared.planner.shapes import SHAPES, ModelShape
from shared.plots.attention import StepTimes
from shared.tables import Table

GB = 1e9
BYTES = 2  # of an activation
A100_FLOPS = 0.5 * 312e12  # half of the 312 bf16 TFLOP/s of NVIDIA's data sheet
BETWEEN_HOSTS = next(link for link in REAL_LINKS if link.name == "InfiniBand, 1 adapter of 200 Gbit/s per host")
LENGTHS = (4_096, 32_768, 131_072, 1_048_576)


def kept_bytes(shape: ModelShape, length: int, tensor_ranks: int, context_ranks: int = 1, full: bool = False) -> float:
    """Return what all layers of a GPU keep of one sequence, with sequence parallelism.

    Args:
        full: Whether only the input of each layer is kept. With sequence parallelism, its ranks share that, too.
    """
    how = {"tensor_ranks": tensor_ranks, "sequence_parallel": True, "attention": "fused", "dropout": False}
    of_layer = formulas.activation_bytes(length, 1, shape.hidden, shape.heads, **how)
    if full:
        of_layer = BYTES * length * shape.hidden / tensor_ranks
    return shape.layers * of_layer / context_ranks


def memory_table(model: str = "Llama-2 70B", tensor_ranks: int = 8, context_ranks: int = 4) -> Table:
    """Show what one sequence keeps on each GPU, by its length, in GB."""
    shape, rows = SHAPES[model], []
    for length in LENGTHS:
        kept = [
            kept_bytes(shape, length, tensor_ranks, ranks, full) / GB
            for ranks in (1, context_ranks)
            for full in (False, True)
        ]
        rows.append([f"{length:,}", *(f"{gb:,.1f}" for gb in kept)])
    tp = f"TP {tensor_ranks} + SP"
    header = ["tokens", tp, "recomputed", f"CP {context_ranks}", "CP and recomputed"]
    ranks = tensor_ranks * context_ranks
    state_gb = formulas.model_state_bytes(shape.parameters, ranks, 3) / GB
    note = (
        f"GB of activations that {shape.layers} layers keep on each GPU, all columns with {tp}. With ZeRO-3 over "
        f"{ranks} GPUs, the state of the model takes {state_gb:.0f} GB more. Estimated with a 4h MLP and fused "
        "attention, without the logits and the layer that is being recomputed."
    )
    return Table(header, rows, note)


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in the forward of one layer, for its n tokens of one sequence, in bytes."""

    shape: ModelShape
    length: float
    ranks: int

    @property
    def tokens(self) -> float:
        return self.length / self.ranks

    @property
    def sequence_parallel(self) -> float:
        """Two all-gathers and two reduce-scatters of all tokens: chapter 13's TP with SP over these ranks."""
        return 4 * formulas.all_gather_sent_bytes(BYTES * self.length * self.shape.hidden, self.ranks)

    @property
    def ring(self) -> float:
        """N − 1 transfers of keys and values."""
        return (self.ranks - 1) * formulas.ring_step_bytes(self.tokens, self.shape.kv_width, BYTES)

    @property
    def all_to_all(self) -> float:
        """All-to-alls of queries and outputs, and a copy of keys and values for each other rank.

        With as many tensor-parallel ranks as heads of keys, each of them has one head, which cannot be split further.
        """
        return 2 * formulas.ring_fraction(self.ranks) * BYTES * self.tokens * self.shape.hidden + self.ring

    def step_s(self, link: RealLink, gpus: int, flops: float = A100_FLOPS) -> tuple[float, float]:
        """Return how long a step of the zigzag ring between hosts computes, and how long its transfer takes.

        Half of the n × n pairs are visible, and a pair costs 4h operations: two for each of two products. The GPUs of
        a host share the heads, and the link.
        """
        computes_s = 2 * self.tokens**2 * self.shape.hidden / (gpus * flops)
        return computes_s, link.alpha_s + self.ring / (self.ranks - 1) / link.bus_bytes_per_s


def traffic_table(model: str = "Llama-2 70B", length: int = 131_072, ranks: int = 4) -> Table:
    """Compare three ways to share a sequence, for one layer's forward."""
    shape = SHAPES[model]
    traffic = Traffic(shape, length, ranks)
    rows = [
        ["TP with SP, over the hosts", f"{traffic.sequence_parallel / GB:.2f}", "no"],
        ["Ulysses, with a copy of the keys per host", f"{traffic.all_to_all / GB:.2f}", "no"],
        ["ring attention", f"{traffic.ring / GB:.2f}", "behind attention"],
    ]
    note = (
        f"What each of the {ranks} hosts sends in the forward of one layer of {model}, for one sequence of {length:,} "
        f"tokens in 16 bits. TP {shape.kv_heads} leaves one key head per GPU, so Ulysses sends a copy to each host. "
        "Derived."
    )
    return Table(["way", "GB sent", "hidden?"], rows, note)


def step_times(model: str = "Llama-2 70B", hosts: int = 4, gpus: int = 8) -> StepTimes:
    """Compute both times for 512 to 262,144 tokens per rank, with one adapter per host, and with one per GPU."""
    traffics = [Traffic(SHAPES[model], hosts * 512 * 2 ** (power / 8), hosts) for power in range(73)]
    links = {
        "transfer, one adapter per host": BETWEEN_HOSTS,
        "transfer, one adapter per GPU": replace(BETWEEN_HOSTS, bus_bytes_per_s=gpus * BETWEEN_HOSTS.bus_bytes_per_s),
    }
    return StepTimes(
        [traffic.tokens for traffic in traffics],
        [traffic.step_s(BETWEEN_HOSTS, gpus)[0] for traffic in traffics],
        {name: [traffic.step_s(link, gpus)[1] for traffic in traffics] for name, link in links.items()},
    )
