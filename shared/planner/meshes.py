"""What one GPU holds, and how long a step takes, if a model is split over a mesh of dp × pp × tp GPUs.

The estimate contains only the terms that decide between layouts. Each replica of the model processes its sequences one
at a time, as the micro-batches of a pipeline with the schedule 1F1B:

    memory          the model state (16 bytes per parameter, of which ZeRO-1 divides the 12 of the optimizer by dp), and
                    the activations of min(pp, m) micro-batches of one sequence in flight. Attention is recomputed
                    (selective checkpointing), there is no dropout, and the logits are in fp32. Everything is divided
                    evenly over pp · tp GPUs: tensor parallelism includes sequence parallelism.
    computation     6 FLOPs per parameter and token on the last stage, which also has the output layer and sets the
                    pace of the others, and (p−1)/m times as long for the bubble
    tp              the all-reduces of all layers, or as many bytes with sequence parallelism. Nothing hides them. They
                    are part of each micro-batch, so the bubble lengthens them, too.
    pp              the outputs and gradients of one micro-batch on its way through all stages. Those of the other
                    micro-batches hide behind computation.
    dp              the all-reduce of the gradients after the last micro-batch. ZeRO-1 sends as many bytes.

tp is the innermost axis, and dp the outermost. A group that fits into a host uses the links inside. Otherwise, it sends
through the host's link, together with the other groups of its axis that leave the host.
"""

from typing import NamedTuple

from shared import formulas
from shared.planner.clusters import GB, TFLOPS, Cluster
from shared.planner.shapes import SHAPES, ModelShape
from shared.planner.stages import boundary_bytes

ROOM = 0.9  # of a GPU's memory


class Layout(NamedTuple):
    """How a model is split over dp · pp · tp GPUs."""

    dp: int
    pp: int
    tp: int
    zero_stage: int = 0

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.tp


def check_layout(shape: ModelShape, layout: Layout, sequences: int) -> None:
    """Check that a model and a batch can be split like this.

    Raises:
        ValueError: If not. The message is one sentence.
    """
    if min(layout[:3]) < 1 or layout.zero_stage not in (0, 1):
        raise ValueError(f"dp, pp and tp must be positive, and the ZeRO stage 0 or 1, got {layout}")
    for axis, whole, what in (
        ("tp", shape.heads, "heads"),
        ("pp", shape.layers, "layers"),
        ("dp", sequences, "sequences"),
    ):
        if whole % getattr(layout, axis):
            raise ValueError(f"{axis}={getattr(layout, axis)} does not divide the {whole} {what}")


def held_bytes(shape: ModelShape, layout: Layout, sequences: int) -> float:
    """Estimate the bytes on a GPU of the first stage, which has the most micro-batches in flight.

    Raises:
        ValueError: If the model or the batch cannot be split like this.
    """
    check_layout(shape, layout, sequences)
    dp, pp, tp, zero_stage = layout
    in_flight = min(pp, sequences // dp)
    size = shape.context, 1, shape.hidden, shape.heads
    options = {"tensor_ranks": tp, "sequence_parallel": tp > 1, "dropout": False}
    layer_bytes = formulas.activation_bytes(*size, checkpointing="selective", **options)
    activations = in_flight * shape.layers / pp * layer_bytes
    logits = formulas.logits_bytes(shape.context, 1, shape.vocabulary) / tp
    return formulas.model_state_bytes(shape.parameters / (pp * tp), dp, zero_stage) + activations + logits


def link_bytes_per_s(cluster: Cluster, layout: Layout, axis: str) -> float:
    """Return the bandwidth that each group along an axis gets, for one GPU that sends to the next."""
    stride = {"tp": 1, "pp": layout.tp, "dp": layout.pp * layout.tp}[axis]  # between neighbors of a group
    if stride * getattr(layout, axis) <= cluster.gpus_per_host:
        return cluster.inside_bytes_per_s
    return cluster.between_bytes_per_s / min(stride, cluster.gpus_per_host)


def step_s(shape: ModelShape, cluster: Cluster, layout: Layout, sequences: int) -> float:
    """Estimate the time of a step with this many sequences in the global batch.

    Raises:
        ValueError: If the model or the batch cannot be split like this.
    """
    check_layout(shape, layout, sequences)
    dp, pp, tp, _ = layout
    tokens = sequences * shape.context / dp

    def seconds(axis: str, sent_bytes: float) -> float:
        return sent_bytes / link_bytes_per_s(cluster, layout, axis)

    of_last_stage = shape.layers / pp * shape.layer_parameters + shape.vocabulary * shape.hidden
    computing_s = 6 * of_last_stage * tokens / tp / cluster.flops
    tp_s = seconds("tp", formulas.tensor_parallel_sent_bytes(tokens, shape.hidden, shape.layers / pp, tp))
    pp_s = seconds("pp", 2 * (pp - 1) * boundary_bytes(shape))
    dp_s = seconds("dp", formulas.all_reduce_sent_bytes(2 * shape.parameters / (pp * tp), dp))
    return (computing_s + tp_s) * (1 + formulas.bubble_over_ideal(pp, sequences // dp)) + pp_s + dp_s


def _h100(hosts: int, between_gb_per_s: float) -> Cluster:
    """Return hosts with eight H100: half of their 989 bf16 TFLOP/s, and NVLink's 370 GB/s (links.py)."""
    return Cluster(hosts, 8, 80 * GB, 494 * TFLOPS, 370 * GB, between_gb_per_s * GB)


# The name of each situation: the model, the cluster, and the sequences of the global batch.
SITUATIONS: dict[str, tuple[ModelShape, Cluster, int]] = {
    "7B on 1 host of 8 × 80 GB, 64 sequences": (SHAPES["Llama-2 7B"], _h100(1, 47), 64),
    "70B on 4 hosts of 8 × 80 GB, 400 Gbit/s between hosts, 64 sequences": (SHAPES["Llama-2 70B"], _h100(4, 47), 64),
    "175B on 16 hosts of 8 × 80 GB, 8 × 400 Gbit/s between hosts, 1,024 sequences": (
        SHAPES["GPT-3 175B"],
        _h100(16, 370),
        1024,
    ),
}
