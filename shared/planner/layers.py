"""How long one layer takes with tensor parallelism and with ZeRO-3, on ranks that a given link connects.

    computation           6 FLOPs per parameter and token, divided among the ranks
    tensor parallelism    Its four all-reduces of the activations, in 16 bits, are exposed: the next layer needs them.
    ZeRO-3                Its two all-gathers and its reduce-scatter of the parameters overlap with computation
                          completely. Each rank needs a sequence of its own, so there are at least as many as ranks.

The estimate ignores the FLOPs of attention itself, that a matmul becomes less efficient when it is split, and that the
two all-reduces of backward can overlap with computing the gradients of weights, as in Megatron-LM.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from shared import formulas
from shared.planner.links import REAL_LINKS, RealLink
from shared.planner.shapes import SHAPES, ModelShape
from shared.plots import COLORS, finish, new_axes
from shared.tables import Table

LINKS = (REAL_LINKS[0], REAL_LINKS[4], REAL_LINKS[6])  # NVLink 4, and one adapter of 400 or 100 Gbit/s per host

H100_FLOPS = 0.5 * 989e12  # half of the 989 bf16 TFLOP/s of NVIDIA's data sheet


def computing_s(shape: ModelShape, ranks: int, sequences: int, flops: float = H100_FLOPS) -> float:
    """Estimate how long one of the ranks computes for the forward and backward of a layer."""
    return 6 * shape.layer_parameters * sequences * shape.context / ranks / flops


def tensor_parallel_s(
    shape: ModelShape, link: RealLink, ranks: int, sequences: int, flops: float = H100_FLOPS
) -> float:
    """Estimate the forward and backward of a layer that is split over the ranks."""
    activation_bytes = 2 * sequences * shape.context * shape.hidden
    return computing_s(shape, ranks, sequences, flops) + 4 * link.all_reduce_s(activation_bytes, ranks)


def zero3_s(shape: ModelShape, link: RealLink, ranks: int, sequences: int, flops: float = H100_FLOPS) -> float:
    """Estimate the forward and backward of a layer whose parameters are sharded over the ranks.

    Raises:
        ValueError: If there are fewer sequences than ranks.
    """
    if sequences < ranks:
        raise ValueError(f"ZeRO-3 needs a sequence for each of the {ranks} ranks, got {sequences} sequences")
    pass_s = formulas.ring_all_gather_s(2 * shape.layer_parameters, ranks, link.alpha_s, link.beta_s_per_byte)
    return max(computing_s(shape, ranks, sequences, flops), 3 * pass_s)


def layer_table(
    model: str, links: Sequence[RealLink] = LINKS, ranks: int = 8, batches: tuple[int, ...] = (8, 32)
) -> Table:
    """Show the milliseconds per sequence of one layer.

    Args:
        model: A name in SHAPES.
        batches: How many sequences the ranks process together with ZeRO-3. For tensor parallelism, it is one; more of
            them only make latency matter less.
    """
    shape, rows = SHAPES[model], []
    for link in links:
        per_sequence_s = [tensor_parallel_s(shape, link, ranks, 1)]
        per_sequence_s += [zero3_s(shape, link, ranks, sequences) / sequences for sequences in batches]
        rows.append([link.name, *(f"{1e3 * lasts_s:.1f}" for lasts_s in per_sequence_s)])
    header = ["link", "TP, 1 sequence", *(f"ZeRO-3, {sequences} sequences" for sequences in batches)]
    computing_ms = 1e3 * computing_s(shape, ranks, 1)
    note = (
        f"Milliseconds of a layer of {shape.name}, divided by the number of sequences, which {ranks} H100 process "
        "together. With one adapter per host, each GPU is on a host of its own. "
        f"Computing alone takes {computing_ms:.1f} ms."
    )
    return Table(header, rows, note)


def two_hosts() -> RealLink:
    """Return the link of a ring of 16 H100 on two hosts, of which two steps cross the adapters."""
    inside, adapter = LINKS[:2]
    return replace(adapter, gpus=16, alpha_s=(14 * inside.alpha_s + 2 * adapter.alpha_s) / 16)


def layer_figure(model: str) -> Figure:
    """Draw how long a layer of a model takes with one sequence if 1 to 16 H100 share it, on one host and on two."""
    shape = SHAPES[model]
    sizes = {1: LINKS[0], 2: LINKS[0], 4: LINKS[0], 8: LINKS[0], 16: two_hosts()}
    names = [f"t = {ranks}" + ("\non two hosts" if ranks > 8 else "") for ranks in sizes]
    computing = [1e3 * computing_s(shape, ranks, 1) for ranks in sizes]
    total = [1e3 * tensor_parallel_s(shape, link, ranks, 1) for ranks, link in sizes.items()]
    sending = [whole - part for whole, part in zip(total, computing, strict=True)]
    figure, axes = new_axes(6.0, 3.2)
    axes.bar(names, computing, color=COLORS[0], edgecolor="black", linewidth=0.6, label="computing")
    style = {"color": COLORS[1], "hatch": "///", "edgecolor": "black", "linewidth": 0.6, "label": "all-reduces"}
    drawn = axes.bar(names, sending, bottom=computing, **style)
    axes.bar_label(drawn, [f"{each:.1f}" for each in total], padding=3)
    title = f"Between hosts, the all-reduces outlast the computing\nA layer of {shape.name}, one sequence (computed)"
    axes.set(ylabel="milliseconds", ylim=(0, 1.15 * max(total)), title=title)
    axes.legend(frameon=False)
    return finish(figure)
