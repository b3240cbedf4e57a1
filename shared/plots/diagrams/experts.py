"""Diagrams of experts: how tokens are routed, what the two all-to-alls move, and which ranks share what."""

from itertools import pairwise

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
    drawing.text(left + 2 * cell_in[0], 0.67, "the router's scores, %", "heading", weight="bold")
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


def _alone(layers: int) -> list[tuple[str, int, float, float]]:
    """Return the spans of one micro-batch: (name, micro-batch, began, ended), one after another."""
    found, now = [], 0.0
    for _ in range(layers):
        for name, ms in _STEPS:
            found.append((name, 0, now, now + ms))
            now += ms
    return found


def in_turns(layers: int) -> list[tuple[str, int, float, float]]:
    """Return the spans of two micro-batches that share the GPU and the network: each waits until both are free."""
    free, ready, done, found = {"gpu": 0.0, "network": 0.0}, [0.0, 0.0], [0, 0], []
    while min(done) < layers * len(_STEPS):
        possible = [batch for batch in (0, 1) if done[batch] < layers * len(_STEPS)]
        name_of = {batch: _STEPS[done[batch] % len(_STEPS)] for batch in possible}
        where = {batch: "gpu" if name_of[batch][0] in "AM" else "network" for batch in possible}
        batch = min(possible, key=lambda each: max(ready[each], free[where[each]]))
        name, ms = name_of[batch]
        began = max(ready[batch], free[where[batch]])
        ready[batch] = free[where[batch]] = began + ms
        found.append((name, batch, began, began + ms))
        done[batch] += 1
    return found


def hidden_exchanges() -> Figure:
    """Draw two layers: with one micro-batch, the GPU waits for each exchange; with two, the other one computes."""
    drawing = Drawing(8.8, 4.35, "Where an all-to-all hides: behind another micro-batch")
    layers, alone, turns = 2, _alone(2), in_turns(2)
    end_ms = max(2 * alone[-1][3], turns[-1][3])
    clock = Clock(1.75, 8.55, 0.0, end_ms)
    twice = alone + [(name, 1, began + alone[-1][3], ended + alone[-1][3]) for name, _, began, ended in alone]
    for top, spans, words in ((0.95, twice, "one after the other"), (2.5, turns, "in turns")):
        drawing.text(clock.left_in, top - 0.2, f"Two micro-batches, {words}", "heading", ha="left", weight="bold")
        for offset, names, row in ((0.0, "AM", "GPU"), (0.5, "DC", "network")):
            y = top + offset
            drawing.text(clock.left_in - 0.15, y + 0.21, row, ha="right")
            its = [span for span in spans if span[0] in names]
            for name, batch, began, ended in its:
                fill = {"facecolor": ("white", "0.75")[batch]}
                clock.span(drawing, y, (began, ended), f"{name}{batch}", 0.42, **fill)
            if names == "AM":
                for (_, _, _, idle), (_, _, again, _) in pairwise(its):
                    if again > idle:
                        clock.span(drawing, y, (idle, again), "", 0.42, facecolor="0.88", **WAITS)
        busy = sum(ended - began for name, _, began, ended in spans if name in "AM")
        share = busy / max(span[3] for span in spans)
        drawing.text(8.55, top - 0.2, f"GPU busy {share:.0%}", ha="right")
    clock.axis(drawing, 3.66, [0.0, *(40.0 * n for n in range(1, int(end_ms // 40) + 1))])
    legend = f"A attention, D dispatch, M experts, C combine, over {layers} layers; the digit is the micro-batch"
    drawing.text(clock.left_in, 4.12, legend, "note", ha="left")
    return drawing.finish()
