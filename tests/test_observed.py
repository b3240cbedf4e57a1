"""What `shared.spmd.observed` says about the tensors of a split model is true."""

import pytest
import torch

from shared import spmd
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.plots import COLORS
from shared.plots.placements import placements as figure_of
from shared.spmd.observed import Observed, Seen, placement_of

pytestmark = pytest.mark.chapter("gspmd")

WHOLE = torch.arange(24.0).view(2, 12)
CHANGE = "blocks.0.up.weight"


def after(tensors: list) -> list:
    return [tensor + 1 for tensor in tensors]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([WHOLE, WHOLE], "Replicate()"),
        ([WHOLE / 4, 3 * WHOLE / 4], "Partial()"),
        (list(WHOLE.chunk(2, 0)), "Shard(0)"),
        (list(WHOLE.chunk(2, 1)), "Shard(1)"),
        (list(WHOLE.chunk(2, 1))[::-1], "none of these"),
        ([part.flatten(1) for part in WHOLE.unflatten(1, (3, 4)).chunk(2, 2)], "Shard(1), strided"),
        ([2 * WHOLE, 2 * WHOLE], "none of these"),
        ([WHOLE, WHOLE / 2], "none of these"),
        ([WHOLE[:1, :4], WHOLE[:1, :4]], "none of these"),
    ],
)
def test_the_placement_of_a_tensor(tensors, expected):
    assert placement_of(tensors, after(tensors), WHOLE) == expected


def test_zeros_that_become_different_were_equal_by_chance():
    zeros = [torch.zeros(3), torch.zeros(3)]
    assert placement_of(zeros, zeros, torch.zeros(3)) == "Replicate()"
    assert placement_of(zeros, [torch.ones(3), torch.zeros(3)], torch.zeros(3)) == "Partial()"


def test_tensors_that_the_whole_model_lacks_are_left_out_and_changes_are_relative():
    before = {"x": torch.full((4,), 2.0), "extra": torch.ones(1)}
    changed = {"x": torch.full((4,), 2.5), "extra": torch.ones(1)}
    whole = Observed({"x": torch.full((4,), 4.0)}, {})
    (seen,) = spmd.compare([Observed(before, changed), Observed(before, before)], whole)
    assert (seen.name, seen.placement, seen.changes) == ("x", "Partial()", [0.25, 0.0])


# -- a model of chapter 13


def observe(sequence_parallel: bool, has_copies: bool):
    from shared import spmd
    from shared.data import CharTokens
    from shared.models import GPTConfig, TinyGPT
    from solutions.tensor_parallel import parallelize

    batch = CharTokens().windows([0, 500], 64)
    gpt = parallelize(TinyGPT(GPTConfig(layers=1)).double(), sequence_parallel=sequence_parallel)
    kept = gpt.get_parameter("blocks.0.up.weight").detach().clone()
    found = spmd.observe(
        gpt, lambda gpt: gpt(*batch, has_copies=has_copies).backward(), change="blocks.0.up.weight", on_rank=1
    )
    return found, torch.equal(kept, gpt.get_parameter("blocks.0.up.weight"))


@pytest.fixture(scope="module")
def whole() -> Observed:
    batch = CharTokens().windows([0, 500], 64)
    return spmd.observe(TinyGPT(GPTConfig(layers=1)).double(), lambda gpt: gpt(*batch).backward())


def seen_in(four_ranks, whole, **options) -> dict[str, Seen]:
    found = four_ranks.run(observe, **options)
    assert all(is_restored for _, is_restored in found)
    seen = spmd.compare([observed for observed, _ in found], whole)
    assert len(seen) == len(whole.before)
    return {each.name: each for each in seen}


SHARDED = {
    "blocks.0.attention.query_key_value": "Shard(2), strided",
    "blocks.0.attention.query_key_value.weight.grad": "Shard(0), strided",
    "blocks.0.attention.project.weight.grad": "Shard(1)",
    "blocks.0.up": "Shard(2)",
    "blocks.0.up.weight.grad": "Shard(0)",
    "blocks.0.down.weight.grad": "Shard(1)",
    "token_embedding.weight.grad": "Shard(0)",
    "output": "Shard(2)",
}


def test_a_split_model_is_replicated_outside_its_pairs(four_ranks, whole):
    seen = seen_in(four_ranks, whole, sequence_parallel=False, has_copies=False)
    assert {name: each.placement for name, each in seen.items() if each.placement != "Replicate()"} == SHARDED
    assert spmd.still_partial(list(seen.values())) == []
    assert [change > 0 for change in seen["blocks.0.up"].changes] == [False, True, False, False]
    assert max(seen["blocks.0.norm_2"].changes) == 0
    first, *others = seen["blocks.0.down"].changes
    assert first > 0.01 and others == pytest.approx([first] * 3)


def test_with_sequence_parallelism_the_gradients_of_norms_must_be_added_up(four_ranks, whole):
    right = seen_in(four_ranks, whole, sequence_parallel=True, has_copies=False)
    broken = seen_in(four_ranks, whole, sequence_parallel=True, has_copies=True)
    assert right["blocks.0.norm_1"].placement == "Shard(1)" and right["position_embedding"].placement == "Shard(0)"
    assert spmd.still_partial(list(right.values())) == []
    norms = {name for name in whole.before if name.endswith(".grad") and "norm" in name}
    assert set(spmd.still_partial(list(broken.values()))) == {*norms, "position_embedding.weight.grad"}


# -- the figure

EXAMPLE = [
    Seen("blocks.0.up", "Shard(2)", [0.0, 0.1]),
    Seen("blocks.0.attention.query_key_value.weight.grad", "Shard(0), strided", [0.02, 0.03]),
    Seen("norm.weight.grad", "Partial()", [0.02, 0.03]),
]


def test_the_figure_frames_what_is_wrong():
    (axes,) = figure_of({"mine": EXAMPLE}).axes
    texts = {text.get_text(): text for text in axes.texts}
    assert {"blocks.0.query_key_value.weight.grad", "Shard(0), strided", "Σ", "mine"} <= set(texts)
    assert "blocks.0.up" not in texts, "it is not a gradient"
    framed = [name for name, text in texts.items() if text.get_bbox_patch() is not None]
    assert framed == ["Partial()"]
    assert texts["Partial()"].get_bbox_patch().get_edgecolor()[:3] == pytest.approx(
        tuple(int(COLORS[1][i : i + 2], 16) / 255 for i in (1, 3, 5))
    )


def test_a_placement_that_is_unknown_is_framed_too():
    (axes,) = figure_of({"mine": [Seen("up.grad", "none of these", [0.0, 0.0])]}).axes
    assert [text.get_text() for text in axes.texts if text.get_bbox_patch() is not None] == ["none of these"]
