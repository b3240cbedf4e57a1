"""Diagrams of experts: how tokens are routed, what the two all-to-alls move, and which ranks share what."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import CELL_IN, MESSAGE, WAITS, Clock, Drawing

# Made-up scores of six tokens for four experts. Each token goes to the expert with its highest score.
_SCORES = ((5, 60, 25, 10), (70, 10, 15, 5), (10, 55, 20, 15), (15, 5, 20, 60), (20, 65, 5, 10), (55, 20, 15, 10))
# The expert that each of the four tokens of a rank chooses; expert e is on rank e.
_CHOICES = ((1, 1, 2, 0), (3, 1, 0, 1), (1, 2, 2, 1), (0, 3, 1, 2))
# The steps of a layer: attention, dispatch, experts, combine. In DeepSeek-V3, exchanging takes as long as computing.
_STEPS = (("A", 20.0), ("D", 20.0), ("M", 20.0), ("C", 20.0))


def top_1_routing() -> Figure:
    """Draw the scores of six tokens, and which expert each of them goes to."""
    drawing = Drawing(8.8, 4.3, "Each token goes to the expert with its highest score")
    left, top, cell_in = 1.15, 1.15, (0.72, CELL_IN[1])
    chosen = [max(range(4), key=scores.__getitem__) for scores in _SCORES]
    drawing.text(left + 2 * cell_in[0], 0.67, "the router's probabilities, %", "heading", weight="bold")
    for expert in range(4):
        drawing.text(left + (expert + 0.5) * cell_in[0], 0.95, f"E{expert}")
    for token, scores in enumerate(_SCORES):
        y = top + token * 0.48
        drawing.text(left - 0.15, y + cell_in[1] / 2, f"token {token}", ha="right")
        for expert, score in enumerate(scores):
            owner = (expert,) if expert == chosen[token] else ()
            drawing.cell(left + expert * cell_in[0], y, f"{score}", owner, cell_in)
    for expert in range(4):
        y = 0.95 + expert * 0.8
        tokens = [token for token, its in enumerate(chosen) if its == expert]
        drawing.box(5.6, y, 3.05, 0.68)
        drawing.rank_label(5.68, y + 0.15, expert, 1.0)
        for index, token in enumerate(tokens):
            drawing.cell(6.85 + index * 0.58, y + 0.15, f"{token}", (expert,))
            start = (left + 4 * cell_in[0] + 0.06, top + token * 0.48 + cell_in[1] / 2)
            drawing.message(start, (5.57, y + 0.18 + 0.16 * index))
        if not tokens:
            drawing.text(7.4, y + 0.34, "nobody chose it")
    drawing.text(7.1, 0.67, "expert e is on rank e", "heading", weight="bold")
    return drawing.finish()


def received_by(expert: int) -> list[tuple[int, int]]:
    """Return the tokens that an expert gets, in rank order, each as (rank, index)."""
    return [(rank, index) for rank, own in enumerate(_CHOICES) for index, its in enumerate(own) if its == expert]


def two_all_to_alls() -> Figure:
    """Draw the tokens of four ranks before dispatch, at their experts, and after combine."""
    drawing = Drawing(8.8, 4.75, "Dispatch and combine: two all-to-alls around the experts")
    left, column = 2.35, 1.62
    small = (0.37, 0.34)
    rows = {"own": 0.95, "dispatch": 1.5, "experts": 2.15, "combine": 3.35, "back": 3.95}
    drawing.name_rows(
        (rows["own"], "A rank's tokens", "The number is the\nexpert of a token."),
        (rows["experts"], "At the experts", "Color: the rank\nthat sent the token."),
        (rows["back"], "Back home", "The results have\nthe first order."),
    )
    for rank, own in enumerate(_CHOICES):
        x = left + rank * column
        drawing.rank_label(x, 0.5, rank, 1.48, 0.32)
        for index, expert in enumerate(own):
            drawing.cell(x + index * small[0], rows["own"], f"{expert}", (rank,), small)
            drawing.cell(x + index * small[0], rows["back"], f"{expert}'", (rank,), small)
        for place, (source, _) in enumerate(received_by(rank)):
            cell = (x + place % 4 * small[0], rows["experts"] + place // 4 * small[1])
            drawing.cell(*cell, f"{rank}", (source,), small)
        rows_here = len(received_by(rank))
        drawing.text(x + 0.74, rows["experts"] + 0.88, f"{rows_here} rows", "note")
    for name, words in {"dispatch": "all-to-all: dispatch", "combine": "all-to-all: combine"}.items():
        drawing.collective(left, rows[name], 3 * column + 1.48, words, 0.4)
    drawing.text(left, 4.52, "In backward, the gradients take both steps in reverse: two more all-to-alls.", ha="left")
    return drawing.finish()


def expert_fold() -> Figure:
    """Draw eight ranks: eight replicas of everything else, and two replicas of four shards of the experts."""
    drawing = Drawing(8.8, 3.75, "Eight ranks: dp = 8 for attention, and ep = 4 × 2 replicas for the experts")
    left, width, gap = 2.35, 0.72, 0.07
    top, below = 1.0, 1.85
    drawing.name_rows(
        (top, "Everything else", "Eight replicas, each\nwith its own samples."),
        (below, "Experts 0 to 7", "Two on each rank.\nRanks 0–3 have all."),
    )
    for rank in range(8):
        x = left + rank * (width + gap)
        drawing.text(x + width / 2, 0.7, f"rank {rank}", "note", weight="bold")
        drawing.cell(x, top, "A", (), (width, 0.5))
        shard = rank % 4
        drawing.cell(x, below, f"{2 * shard}, {2 * shard + 1}", (shard,), (width, 0.5))
    for group in (0, 1):
        x = left + 4 * group * (width + gap)
        drawing.collective(x, 2.6, 4 * width + 3 * gap, "all-to-alls of tokens (ep)", 0.32)
    start, end = (left + rank * (width + gap) + width / 2 for rank in (0, 4))
    for ends in (((start, 2.38), (start, 2.5)), ((end, 2.38), (end, 2.5)), ((start, 2.5), (end, 2.5))):
        drawing.line(*ends, color=MESSAGE)
    drawing.text(left, 3.16, "Gradients of A: all-reduced over all 8 ranks.", ha="left")
    drawing.text(left, 3.42, "Gradients of experts 0 and 1: all-reduced over ranks 0 and 4 (the line).", ha="left")
    return drawing.finish()


@dataclass(frozen=True)
class Span:
    """A step of a layer of one micro-batch. An ′ marks backward."""

    step: str
    batch: int
    layer: int
    began_ms: float
    ended_ms: float

    @property
    def computes(self) -> bool:
        return self.step[0] in "AM"

    @property
    def words(self) -> str:
        return f"{self.step}{self.layer + 1}"


def one_after_the_other(layers: int = 2) -> list[Span]:
    """Return the spans of the forwards of two micro-batches, the second one after the first."""
    found, now_ms = [], 0.0
    for batch in (0, 1):
        for layer in range(layers):
            for step, ms in _STEPS:
                found.append(Span(step, batch, layer, now_ms, now_ms + ms))
                now_ms += ms
    return found


def in_turns(layers: int = 2) -> list[Span]:
    """Return the spans of two forwards that share the GPU and the network: each step waits until its place is free."""
    free_ms, ready_ms, done, found = {True: 0.0, False: 0.0}, [0.0, 0.0], [0, 0], []
    every = [(step, layer, ms) for layer in range(layers) for step, ms in _STEPS]
    while min(done) < len(every):
        possible = [batch for batch in (0, 1) if done[batch] < len(every)]
        on_gpu = {batch: every[done[batch]][0] in "AM" for batch in possible}
        batch = min(possible, key=lambda each: max(ready_ms[each], free_ms[on_gpu[each]]))
        step, layer, ms = every[done[batch]]
        began_ms = max(ready_ms[batch], free_ms[on_gpu[batch]])
        ready_ms[batch] = free_ms[on_gpu[batch]] = began_ms + ms
        found.append(Span(step, batch, layer, began_ms, began_ms + ms))
        done[batch] += 1
    return found


def beside_backward(layers: int = 2) -> list[Span]:
    """Return the spans of DualPipe's pair: the forward of micro-batch 0, and the backward of micro-batch 1."""
    found, now_ms = [], 0.0
    for layer in range(layers):
        for forward, backward in zip("ADMC", "CMDA", strict=True):
            ends_ms = now_ms + _STEPS[0][1]
            found.append(Span(forward, 0, layer, now_ms, ends_ms))
            found.append(Span(f"{backward}′", 1, layers - 1 - layer, now_ms, ends_ms))
            now_ms = ends_ms
    return found


def hidden_exchanges() -> Figure:
    """Draw two layers of two micro-batches: in sequence, in turns, and a forward beside a backward."""
    drawing = Drawing(9.0, 5.95, "Where an all-to-all hides: behind another micro-batch")
    ways = {
        "Two forwards, one after the other": one_after_the_other(),
        "Two forwards, in turns": in_turns(),
        "The forward of 0 beside the backward of 1, as in DualPipe": beside_backward(),
    }
    end_ms = max(span.ended_ms for spans in ways.values() for span in spans)
    clock = Clock(1.75, 8.75, 0.0, end_ms)
    for index, (words, spans) in enumerate(ways.items()):
        top = 0.95 + 1.45 * index
        drawing.text(clock.left_in, top - 0.2, words, "heading", ha="left", weight="bold")
        for offset, computes, row in ((0.0, True, "GPU"), (0.5, False, "network")):
            y = top + offset
            drawing.text(clock.left_in - 0.15, y + 0.21, row, ha="right")
            lane = [span for span in spans if span.computes == computes]
            for span in lane:
                fill = {"facecolor": ("white", "0.75")[span.batch]}
                clock.span(drawing, y, (span.began_ms, span.ended_ms), span.words, 0.42, **fill)
            ends_ms = [span.ended_ms for span in lane]
            begins_ms = [*(span.began_ms for span in lane[1:]), max(span.ended_ms for span in spans)]
            for idle_ms in zip(ends_ms, begins_ms, strict=True) if computes else ():
                if idle_ms[1] > idle_ms[0]:
                    clock.span(drawing, y, idle_ms, "", 0.42, facecolor="0.88", **WAITS)
        busy_ms = sum(span.ended_ms - span.began_ms for span in spans if span.computes)
        share = busy_ms / max(span.ended_ms for span in spans)
        drawing.text(8.75, top - 0.2, f"GPU busy {share:.0%}", ha="right")
    clock.axis(drawing, 5.15, [40.0 * n for n in range(int(end_ms // 40) + 1)])
    steps = "A attention, D dispatch, M experts, C combine; ′ is backward. Hatched: the GPU waits."
    drawing.text(clock.left_in, 5.55, steps, "note", ha="left")
    numbers = "Gray: micro-batch 1. The other cells: micro-batch 0. A2 is the attention of layer 2."
    drawing.text(clock.left_in, 5.78, numbers, "note", ha="left")
    return drawing.finish()
