"""The diagrams follow the rules of their mechanism, their texts can be read, and they do not need color."""

import math
import warnings
from dataclasses import dataclass
from itertools import combinations

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from shared import formulas
from shared.plots import diagrams, rank_color, rank_ink
from shared.plots.buckets import bucket_style
from shared.plots.diagrams import backward, collectives

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # every figure is drawn and measured

WORLD_SIZES = (2, 3, 4)
DIAGRAMS = {name: lambda name=name: diagrams.collective(name) for name in collectives.NAMES} | {
    "processes": diagrams.processes,
    "data_parallelism": diagrams.data_parallelism,
    "tree_broadcast": diagrams.tree_broadcast,
    "buckets": diagrams.buckets,
    "hooks": diagrams.hooks,
    "exposed_communication": diagrams.exposed_communication,
    "zero1_step": diagrams.zero1_step,
    "bucket_owners": diagrams.bucket_owners,
    "unit": diagrams.unit,
    "per_parameter": diagrams.per_parameter,
    "deferred_init": diagrams.deferred_init,
    "ring": diagrams.ring,
    "training_memory": diagrams.training_memory,
    "unit_states": diagrams.unit_states,
    "streams": diagrams.streams,
    "fsdp_hooks": diagrams.fsdp_hooks,
    "hybrid_mesh": diagrams.hybrid_mesh,
    "mesh_3d": diagrams.mesh_3d,
    "atomic_save": diagrams.atomic_save,
    "background_save": diagrams.background_save,
    "split_matrix": diagrams.split_matrix,
    "split_heads": diagrams.split_heads,
    "split_loss": diagrams.split_loss,
    "conjugate_operators": diagrams.conjugate_operators,
    "sequence_parallel": diagrams.sequence_parallel,
    "ring_attention": diagrams.ring_attention,
    "causal_orders": diagrams.causal_orders,
    "cluster_of_hosts": diagrams.cluster_of_hosts,
    "tokens_for_heads": diagrams.tokens_for_heads,
    "tiled_weight": diagrams.tiled_weight,
    "five_products": diagrams.five_products,
    "placements": diagrams.placements,
    "top_1_routing": diagrams.top_1_routing,
    "two_all_to_alls": diagrams.two_all_to_alls,
    "expert_fold": diagrams.expert_fold,
    "hidden_exchanges": diagrams.hidden_exchanges,
    "quantized_all_reduce": diagrams.quantized_all_reduce,
    "top_k": diagrams.top_k,
    "low_rank": diagrams.low_rank,
    "local_sgd": diagrams.local_sgd,
}
A_GAP_PX = 2.0
ENOUGH_BRIGHTNESS = 9.0  # of 100; two patches of gray that touch can be told apart


@dataclass
class Drawn:
    """A diagram after it was drawn, with the extents of its texts and patches in pixels."""

    figure: Figure
    texts: list[tuple[Text, Bbox]]
    patches: list[tuple[Patch, Bbox]]


@pytest.fixture(scope="module", params=DIAGRAMS)
def drawn(request) -> Drawn:
    """Draw one diagram, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = DIAGRAMS[request.param]()
        figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    patches = [(patch, patch.get_window_extent()) for patch in figure.axes[0].patches]
    return Drawn(figure, [(text, text.get_window_extent().padded(-0.5)) for text in texts], patches)


def brightness(color) -> float:
    """Return how bright a color is printed: L* of CIE 1976, from 0 to 100."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


# -- what a reader sees


def test_texts_lie_inside_the_figure_and_do_not_overlap(drawn):
    for text, box in drawn.texts:
        edges = drawn.figure.bbox
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= edges.x1 and box.y1 <= edges.y1, text
    for (text, box), (other, other_box) in combinations(drawn.texts, 2):
        assert not box.overlaps(other_box), f"{text.get_text()!r} overlaps {other.get_text()!r}"


def test_a_text_fits_into_its_box(drawn):
    for text, box in drawn.texts:
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        around = [outside for _, outside in drawn.patches if outside.contains(*middle)]
        if around:
            smallest = min(around, key=lambda outside: outside.width * outside.height)
            assert smallest.x0 <= box.x0 and box.x1 <= smallest.x1, f"{text.get_text()!r} is wider than its box"
            assert smallest.y0 <= box.y0 and box.y1 <= smallest.y1, f"{text.get_text()!r} is higher than its box"


def test_a_text_can_be_read_at_the_width_of_a_notebook(drawn):
    assert drawn.figure.get_size_inches()[0] * drawn.figure.dpi <= 900
    assert min(text.get_size() for text, _ in drawn.texts) >= 9


def test_fills_that_touch_differ_in_gray(drawn):
    cells = [
        (patch, box)
        for patch, box in drawn.patches
        if patch.get_facecolor()[3] > 0 and not isinstance(patch, FancyBboxPatch)
    ]
    for (patch, box), (other, other_box) in combinations(cells, 2):
        same = patch.get_facecolor() == other.get_facecolor() and patch.get_hatch() == other.get_hatch()
        nested = box.containsx(other_box.x0 + 1) and box.containsx(other_box.x1 - 1) and box.overlaps(other_box)
        if same or nested or not box.padded(A_GAP_PX).overlaps(other_box):
            continue
        difference = abs(brightness(patch.get_facecolor()) - brightness(other.get_facecolor()))
        assert difference > ENOUGH_BRIGHTNESS, (box, other_box)


def test_a_diagram_has_at_most_six_colors(drawn):
    axes = drawn.figure.axes[0]
    colors = {to_rgb(patch.get_facecolor()) for patch, _ in drawn.patches if patch.get_facecolor()[3] > 0}
    colors |= {to_rgb(patch.get_edgecolor()) for patch, _ in drawn.patches if patch.get_linewidth() > 0}
    colors |= {to_rgb(line.get_color()) for line in axes.lines} | {to_rgb(text.get_color()) for text, _ in drawn.texts}
    colors |= {to_rgb(text.arrow_patch.get_edgecolor()) for text in axes.texts if getattr(text, "arrow_patch", None)}
    assert len({color for color in colors if max(color) - min(color) > 0.01}) <= 6


def test_ranks_differ_in_gray_and_their_names_can_be_read():
    for rank, other in combinations(range(4), 2):
        assert abs(brightness(rank_color(rank)) - brightness(rank_color(other))) > ENOUGH_BRIGHTNESS
    for rank in range(4):
        assert abs(brightness(rank_color(rank)) - brightness(rank_ink(rank))) > 45


def test_neighboring_buckets_differ_in_gray():
    for number in range(1, 30):
        colors = [bucket_style(each)["facecolor"] for each in (number, number + 1)]
        assert abs(brightness(colors[0]) - brightness(colors[1])) > ENOUGH_BRIGHTNESS - 1


# -- what the diagrams say

A, B, C = (tuple(f"{rank}{index}" for index in range(3)) for rank in "ABC")
TOTAL = (6, 12, 18)
RESULTS = {
    "broadcast": [A, A, A],
    "reduce": [TOTAL, ("?",) * 3, ("?",) * 3],
    "all_reduce": [TOTAL, TOTAL, TOTAL],
    "scatter": [("A0",), ("A1",), ("A2",)],
    "gather": [("A", "B", "C"), (), ()],
    "all_gather": [("A", "B", "C")] * 3,
    "reduce_scatter": [(6,), (12,), (18,)],
    "all_to_all": [("A0", "B0", "C0"), ("A1", "B1", "C1"), ("A2", "B2", "C2")],
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_collective_leaves_on_every_rank_what_torch_leaves(name):
    _, after = collectives.before_and_after(name, 3)
    assert [tuple(element.value for element in tensor) for tensor in after] == RESULTS[name]


def test_every_collective_has_elements():
    assert set(collectives.NAMES) == set(RESULTS)


def test_a_sum_has_the_colors_of_all_ranks_and_a_copy_that_of_its_owner():
    _, [total, *_] = collectives.before_and_after("all_reduce", 3)
    _, [_, copy, _] = collectives.before_and_after("broadcast", 3)
    assert {element.ranks for element in total} == {(0, 1, 2)} and {element.ranks for element in copy} == {(0,)}


@pytest.mark.parametrize(
    ("name", "arrows"), [("broadcast", 2), ("gather", 2), ("reduce_scatter", 6), ("all_to_all", 6)]
)
def test_arrows_lead_to_the_ranks_that_need_an_element(name, arrows):
    axes = diagrams.collective(name, 3).axes[0]
    assert sum(getattr(text, "arrow_patch", None) is not None for text in axes.texts) == arrows


def test_what_cannot_be_drawn_is_rejected():
    with pytest.raises(ValueError, match=r"name must be one of broadcast, .*, got 'all-reduce'"):
        diagrams.collective("all-reduce")


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_tree_reaches_every_rank_once_in_the_fewest_rounds(world_size):
    rounds = collectives.tree_rounds(world_size)
    holders = {0}
    for messages in rounds:
        assert {sender for sender, _ in messages} <= holders, "a rank sends only what it has"
        assert len({sender for sender, _ in messages}) == len(messages), "a rank sends once in a round"
        holders |= {receiver for _, receiver in messages}
    assert holders == set(range(world_size)) and len(rounds) == math.ceil(math.log2(world_size))
    assert sum(map(len, rounds)) == world_size - 1


def test_buckets_begin_with_the_last_gradient_and_keep_to_the_cap():
    sizes_mb = {"first": 3.0, "large": 9.0, "third": 2.0, "last": 2.0}
    assert backward.in_buckets(sizes_mb, 4.0) == [["last", "third"], ["large"], ["first"]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_exposed_time_is_that_of_the_formula(world_size):
    overlapped, blocking = backward.step_of(world_size, True), backward.step_of(world_size, False)
    lasts_ms = [completed - launched for launched, completed in overlapped.flights_ms]
    exposed_ms = formulas.exposed_s(overlapped.ready_ms, lasts_ms, overlapped.backward_ms)
    assert overlapped.exposed_ms == pytest.approx(exposed_ms)
    assert overlapped.exposed_ms + overlapped.hidden_ms == pytest.approx(sum(lasts_ms))
    assert blocking.hidden_ms == pytest.approx(0) and blocking.exposed_ms == pytest.approx(sum(lasts_ms))


def test_the_diagram_of_exposed_communication_says_how_long_it_is():
    texts = {text.get_text() for text in diagrams.exposed_communication().axes[0].texts}
    assert {"exposed: 72 ms", "exposed: 32 ms", "hidden: 40 ms"} <= texts
