"""Diagrams of sharded gradients and optimizer states: which rank owns what, and when memory is freed."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import CELL_IN, COMPUTE, OWN_RANK, WAITS, WORLD_SIZE, Clock, Drawing


def zero1_step() -> Figure:
    """Draw a step of ZeRO-1: the two halves of an all-reduce, with the optimizer between them."""
    drawing = Drawing(8.8, 7.0, "ZeRO-1: the two halves of an all-reduce, with the optimizer between them")
    left = 2.75
    column = (drawing.width_in - left - 0.15) / WORLD_SIZE
    everyone = tuple(range(WORLD_SIZE))
    drawing.name_rows(
        (1.05, "Gradients", f"Backward gives every rank\ngradients of its own, here\nas {WORLD_SIZE} shards."),
        (2.55, "Mean gradients", "Each rank keeps the mean of\nits own shard. The rest of the\ntensor is not used."),
        (3.6, "Optimizer states", "A rank has them for one\nshard only."),
        (4.6, "Parameters", "Each rank updates its shard.\nThose without color are old."),
        (6.1, "Parameters", "Every rank has all updated\nshards for the next forward."),
    )
    size_in = (min(0.36, (column - 0.3) / WORLD_SIZE), CELL_IN[1])
    for rank in everyone:
        x, middle = left + column * rank + 0.07, left + column * (rank + 0.5)
        drawing.box(x, 0.5, column - 0.14, 6.3)
        drawing.rank_label(x, 0.5, rank, column - 0.14)
        for shard in everyone:
            cell_x, own = middle + size_in[0] * (shard - WORLD_SIZE / 2), shard == rank
            drawing.cell(cell_x, 1.1, f"{shard}", (rank,), size_in)
            drawing.cell(cell_x, 2.6, f"{shard}" if own else "?", everyone if own else (), size_in)
            if own:
                drawing.cell(cell_x, 3.6, f"{shard}", (rank,), size_in)
                own_middle = cell_x + size_in[0] / 2
            else:
                drawing.absent(cell_x, 3.6, size_in)
            drawing.cell(cell_x, 4.6, f"{shard}", (rank,) if own else (), size_in)
            drawing.cell(cell_x, 6.1, f"{shard}", (shard,), size_in)
        drawing.message((middle, 1.52), (middle, 1.84))
        drawing.message((own_middle, 2.24), (own_middle, 2.56))
        drawing.arrow((own_middle, 3.02), (own_middle, 3.56))
        drawing.arrow((own_middle, 4.02), (own_middle, 4.56))
        drawing.message((own_middle, 5.02), (own_middle, 5.34))
        drawing.message((middle, 5.74), (middle, 6.06))
    across = drawing.width_in - left - 0.25
    drawing.collective(left + 0.05, 1.87, across, "reduce-scatter of the gradients: first half of an all-reduce")
    drawing.collective(left + 0.05, 5.37, across, "all-gather of the parameters: second half of an all-reduce")
    return drawing.finish()


_LAYER_MS, _LAYERS, _BUCKETS, _BUCKET_MS, _OPTIMIZER_MS = 10, 6, 3, 20, 15


@dataclass(frozen=True)
class Life:
    """The life of a bucket's flat tensor, in ms since backward began."""

    allocated_ms: float  # when its first gradient is complete
    launched_ms: float  # when its last gradient is complete
    completed_ms: float
    freed_ms: float


def lives_of(world_size: int) -> list[Life]:
    """Compute the lives of the buckets, in launch order, as in chapter 08's ZeRO2.

    Before it launches a bucket, a rank waits for the bucket before it, keeps its shard of that one, and frees the rest.
    finish_gradient_sync() does the same for the last bucket. Each rank of a reduce-scatter sends (N−1)/N times the
    bytes of the bucket.
    """
    layers = _LAYERS // _BUCKETS
    lasts_ms = _BUCKET_MS * (world_size - 1) / world_size
    launches_ms = [float(_LAYER_MS * layers * (index + 1)) for index in range(_BUCKETS)]
    frees_ms = [*launches_ms[1:], launches_ms[-1] + lasts_ms]
    return [
        Life(launched_ms - _LAYER_MS * (layers - 1), launched_ms, launched_ms + lasts_ms, freed_ms)
        for launched_ms, freed_ms in zip(launches_ms, frees_ms, strict=True)
    ]


def bucket_owners() -> Figure:
    """Draw when a rank has memory for each bucket of ZeRO-2, which shard it keeps, and who owns the others."""
    lives = lives_of(WORLD_SIZE)
    drawing = Drawing(8.8, 5.35, "Bucket owners: every rank keeps one shard of every bucket, and frees the rest")
    clock = Clock(1.75, 6.85, 0, lives[-1].freed_ms + _OPTIMIZER_MS)
    owners_x, width = 7.35, min(0.32, 1.28 / WORLD_SIZE)
    layers = _LAYERS // _BUCKETS
    firsts = [_LAYERS - 1 - layers * index for index in range(_BUCKETS)]
    drawing.text(0.15, 0.8, "compute", ha="left")
    drawing.text(0.15, 1.42, "reduce-scatters", ha="left")
    drawing.name_rows(
        *(
            (2.05 + 0.85 * index, f"Bucket {index + 1}", f"layers {first} and {first - 1}")
            for index, first in enumerate(firsts)
        )
    )
    drawing.text(owners_x + WORLD_SIZE * width / 2, 1.42, "owners (ranks)\nof its shards", weight="bold")
    for layer in range(_LAYERS):
        ended_ms = _LAYER_MS * (_LAYERS - layer)
        clock.span(drawing, 0.6, (ended_ms - _LAYER_MS, ended_ms), f"layer {layer}", 0.4, facecolor=COMPUTE)
    clock.span(drawing, 0.6, (lives[-1].launched_ms, lives[-1].freed_ms), "waits", 0.4, **WAITS)
    step_ms = lives[-1].freed_ms, lives[-1].freed_ms + _OPTIMIZER_MS
    clock.span(drawing, 0.6, step_ms, "optimizer", 0.4, facecolor=COMPUTE)
    for index, life in enumerate(lives):
        y, launch_x, free_x = 2.0 + 0.85 * index, clock.x(life.launched_ms), clock.x(life.freed_ms)
        flight_in = clock.x(life.completed_ms) - launch_x
        drawing.collective(launch_x + 0.02, 1.25, flight_in - 0.04, f"{index + 1}")
        drawing.message((launch_x, 1.02), (launch_x + 0.04, 1.23))
        clock.shards(drawing, y, (life.allocated_ms, life.freed_ms), range(WORLD_SIZE))
        clock.shards(drawing, y, (life.freed_ms, step_ms[1]), (OWN_RANK,))
        for rank in range(WORLD_SIZE):
            drawing.cell(owners_x + width * rank, y + 0.03, f"{rank}", (rank,), (width, CELL_IN[1]))
        last = index + 1 == _BUCKETS
        words = "freed by finish_gradient_sync()" if last else f"freed when bucket {index + 2} is launched"
        drawing.text(free_x, y + 0.56, words, "note", ha="right" if last else "left")
    words = (
        f"Memory for gradients on rank {OWN_RANK}, allocated for a whole bucket at once. "
        "A stripe is one shard, in the color of its owner."
    )
    clock.axis(drawing, 4.6, [0, *(life.launched_ms for life in lives), lives[-1].freed_ms])
    drawing.text(0.15, 5.12, words, "note", ha="left")
    return drawing.finish()
