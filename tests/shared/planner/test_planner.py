"""Shapes have the published sizes, memory plans follow the formulas, and the figure and the widget show them."""

import re

import pytest

from shared import formulas, planner, widgets
from shared.models import GPTConfig, TinyGPT
from shared.planner import layers, stages
from shared.planner.links import REAL_LINKS, RealLink, link_table
from shared.planner.shapes import SHAPES
from shared.plots import memory_plan as planner_plots

EXACT = {  # parameters in the released weights; those of GPT-3 were never released
    "GPT-2 124M": 124_439_808,
    "GPT-2 355M": 354_823_168,
    "GPT-2 774M": 774_030_080,
    "GPT-2 1.5B": 1_557_611_200,
    "Llama-2 7B": 6_738_415_616,
    "Llama-2 13B": 13_015_864_320,
    "Llama-2 70B": 68_976_648_192,
    "Llama-3 8B": 8_030_261_248,
    "Llama-3 70B": 70_553_706_496,
    "Llama-3 405B": 405_853_388_800,
}
GB = 1e9


# -- shapes


@pytest.mark.parametrize("name", EXACT)
def test_a_shape_has_exactly_the_parameters_of_the_released_model(name):
    assert SHAPES[name].parameters == EXACT[name]


def test_gpt_3_has_the_size_in_the_table_of_its_paper():
    """Table D.1 says 174,600 million; table 2.1 rounds to 175.0 billion."""
    assert set(SHAPES) - set(EXACT) == {"GPT-3 175B"}
    assert SHAPES["GPT-3 175B"].parameters / 1e6 == pytest.approx(174_600, abs=50)


def test_units_are_the_embedding_the_layers_and_the_output():
    shape = SHAPES["Llama-3 8B"]
    assert len(shape.unit_parameters) == shape.layers + 2
    assert shape.unit_parameters[0] == 128256 * 4096 == shape.unit_parameters[-1] - 4096


def test_a_block_of_tiny_gpt_has_the_parameters_of_its_shape():
    """TinyGPT has biases only in its norms."""
    width = 64
    block = TinyGPT(GPTConfig(width=width)).blocks[0]
    shape = SHAPES["GPT-2 124M"].__class__("ours", 2, width, 4, 4, 4 * width, 96, 64)
    biases = 3 * width + width + 4 * width + width
    assert sum(parameter.numel() for parameter in block.parameters()) == shape.layer_parameters - biases


# -- plans


@pytest.mark.parametrize(
    ("precision", "bytes_each"), [*zip(planner.PRECISIONS, [(2, 2, 12), (2, 6, 12), (4, 4, 8)], strict=True)]
)
def test_a_precision_determines_the_bytes_per_parameter(precision, bytes_each):
    shape = SHAPES["Llama-2 7B"]
    plan = planner.plan(shape, ranks=1, stage=0, precision=precision)
    held = (plan.parameters, plan.gradients, plan.optimizer)
    assert held == pytest.approx([per_parameter * shape.parameters for per_parameter in bytes_each])


def test_gathered_bytes_are_those_of_two_neighboring_units():
    """Llama-3 8B's embedding is larger than two of its layers; GPT-3's is smaller than one."""
    llama, gpt = SHAPES["Llama-3 8B"], SHAPES["GPT-3 175B"]
    assert planner.gathered_bytes(llama, 8, 2) == pytest.approx(2 * (128256 * 4096 + 4096 + llama.layer_parameters))
    assert planner.gathered_bytes(gpt, 8, 2) == pytest.approx(2 * 2 * gpt.layer_parameters)
    by_stage = [planner.plan(gpt, ranks=8, stage=stage).gathered for stage in planner.STAGES]
    assert by_stage == [0, 0, 0, pytest.approx(2 * 2 * gpt.layer_parameters)]


def test_activations_grow_with_the_micro_batch_and_shrink_with_checkpoints():
    shape = SHAPES["GPT-3 175B"]

    def activations(micro_batch, checkpointing, bytes_each=2):
        return planner.activations_bytes(shape, micro_batch, shape.context, checkpointing, bytes_each)

    def with_fused_attention(checkpointing):
        return planner.activations_bytes(shape, 1, shape.context, checkpointing, 2, "fused")

    none, selective, full = (activations(1, how) for how in planner.CHECKPOINTING)
    assert none > selective > full and activations(4, "full") == pytest.approx(4 * full)
    sbh, logits = 2048 * 12288, 4 * 2048 * 50257
    assert none == pytest.approx(96 * sbh * (34 + 80) + logits)
    assert selective == pytest.approx(96 * sbh * 34 + sbh * 80 + logits)
    assert full == pytest.approx(96 * sbh * 2 + sbh * 112 + logits)
    assert activations(1, "full", 4) - logits == pytest.approx(96 * sbh * 4 + sbh * (66 + 144 - 4))
    assert with_fused_attention("none") == with_fused_attention("selective") == pytest.approx(96 * sbh * 34 + logits)
    assert with_fused_attention("full") == pytest.approx(96 * sbh * 2 + sbh * 32 + logits)


def test_a_plan_without_sharding_does_not_depend_on_the_number_of_ranks():
    shape = SHAPES["GPT-2 124M"]
    assert planner.plan(shape, ranks=1, stage=0) == planner.plan(shape, ranks=1024, stage=0)


@pytest.mark.parametrize(
    "wrong", [{"stage": 4}, {"precision": "int4"}, {"ranks": 0}, {"checkpointing": "some"}, {"attention": "flat"}]
)
def test_a_plan_with_an_invalid_argument_is_rejected(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        planner.plan(SHAPES["GPT-2 124M"], **({"ranks": 2, "stage": 0} | wrong))


def test_tensor_parallelism_divides_all_but_norms_and_positions():
    shape = SHAPES["GPT-2 124M"]
    replicated = 25 * 2 * 768 + 1024 * 768
    own = planner.own_parameters(shape, 4)
    assert own == replicated + (shape.parameters - replicated) / 4 and planner.own_parameters(shape, 1) == 124_439_808
    plan = planner.plan(shape, ranks=8, stage=1, tensor_ranks=4)
    assert plan.parameters == 2 * own and plan.optimizer == 12 * own / 2


def test_tensor_and_sequence_parallelism_divide_activations_as_the_formula_says():
    shape = SHAPES["GPT-3 175B"]

    def activations(**options):
        return planner.plan(shape, ranks=64, stage=3, **options).activations

    sbh, logits = 2048 * 12288, 4 * 2048 * 50257
    assert activations(tensor_ranks=8) == pytest.approx(96 * sbh * (10 + 24 / 8 + 80 / 8) + logits / 8)
    both = activations(tensor_ranks=8, sequence_parallel=True)
    assert both == pytest.approx((96 * sbh * (34 + 80) + logits) / 8) == pytest.approx(activations() / 8)


def test_tensor_ranks_must_divide_ranks_and_heads():
    for ranks, tensor_ranks in ((8, 3), (10, 5)):
        with pytest.raises(ValueError, match=f"tensor_ranks must divide the {ranks} ranks and the 12 heads"):
            planner.plan(SHAPES["GPT-2 124M"], ranks=ranks, stage=0, tensor_ranks=tensor_ranks)


def test_a_layer_takes_as_long_as_its_computation_and_its_communication():
    shape, link = SHAPES["Llama-2 70B"], REAL_LINKS[0]
    computing_s = 6 * shape.layer_parameters * 4096 / 8 / 494.5e12
    assert layers.computing_s(shape, 8, 1) == pytest.approx(computing_s)
    all_reduces_s = 4 * link.all_reduce_s(2 * 4096 * 8192, 8)
    assert layers.tensor_parallel_s(shape, link, 8, 1) == pytest.approx(computing_s + all_reduces_s)
    assert layers.zero3_s(shape, link, 8, 64) == pytest.approx(64 * computing_s)
    slow_s = 3 * formulas.ring_all_gather_s(2 * shape.layer_parameters, 8, link.alpha_s, link.beta_s_per_byte)
    assert layers.zero3_s(shape, link, 8, 8, flops=1e20) == pytest.approx(slow_s)
    with pytest.raises(ValueError, match="a sequence for each of the 8 ranks, got 7"):
        layers.zero3_s(shape, link, 8, 7)


def test_tensor_parallelism_is_for_links_inside_a_host_as_lesson_13_says():
    """Of one layer of Llama-2 70B on 8 GPUs, compared with computing alone."""
    shape, nvlink, adapter = SHAPES["Llama-2 70B"], REAL_LINKS[0], REAL_LINKS[4]
    inside, between = (
        layers.tensor_parallel_s(shape, link, 8, 1) / layers.computing_s(shape, 8, 1) for link in (nvlink, adapter)
    )
    assert 1.2 < inside < 1.3 and 2.9 < between < 3.2
    for sequences in (8, 32):
        assert layers.zero3_s(shape, nvlink, 8, sequences) < sequences * layers.tensor_parallel_s(shape, nvlink, 8, 1)
    assert layers.zero3_s(shape, adapter, 8, 32) == layers.computing_s(shape, 8, 32)


def test_sixteen_gpus_on_two_hosts_are_slower_than_eight_as_lesson_13_says():
    shape, nvlink, adapter = SHAPES["Llama-2 70B"], REAL_LINKS[0], REAL_LINKS[4]
    eight_s, sixteen_s = (
        layers.tensor_parallel_s(shape, link, ranks, 1) for ranks, link in ((8, nvlink), (16, layers.two_hosts()))
    )
    assert eight_s < sixteen_s < 3 * eight_s
    for link, share in ((nvlink, 0.25), (adapter, 2.0)):
        formula = 2 / 9 * 7 * layers.H100_FLOPS / (shape.hidden * link.bus_bytes_per_s)
        assert formula == pytest.approx(share, rel=0.02)
        without_latency_s = 4 * 2 * 7 / 8 * 2 * 4096 * shape.hidden / link.bus_bytes_per_s
        of_12_h_squared_s = 6 * 12 * shape.hidden**2 * 4096 / 8 / layers.H100_FLOPS
        assert without_latency_s / of_12_h_squared_s == pytest.approx(formula)


def test_the_table_of_a_layer_has_the_times_per_sequence():
    shape, links = SHAPES["Llama-2 70B"], REAL_LINKS[:2]
    table = layers.layer_table("Llama-2 70B", links)
    assert table.header == ["link", "TP, 1 sequence", "ZeRO-3, 8 sequences", "ZeRO-3, 32 sequences"]
    for link, row in zip(links, table.rows, strict=True):
        assert row[:2] == [link.name, f"{1e3 * layers.tensor_parallel_s(shape, link, 8, 1):.1f}"]
        assert row[3] == f"{1e3 * layers.zero3_s(shape, link, 8, 32) / 32:.1f}"


# -- stages of a pipeline


@pytest.mark.parametrize("name", ["GPT-2 124M", "Llama-3 8B"])
@pytest.mark.parametrize(("count", "chunks"), [(1, 1), (2, 1), (5, 1), (14, 1), (2, 3)])
def test_stages_have_all_parameters_and_a_copy_of_a_tied_weight(name, count, chunks):
    shape = SHAPES[name]
    total = sum(stages.stage_parameters(shape, count, stage, chunks) for stage in range(count))
    assert total - shape.parameters == (shape.vocabulary * shape.hidden if shape.tied and count > 1 else 0)


def test_a_single_stage_holds_what_one_rank_does():
    for name in ("GPT-2 124M", "Llama-2 7B"):
        for how in planner.CHECKPOINTING:
            plan = stages.plan_stage(SHAPES[name], stages=1, stage=0, micro_batches=1, checkpointing=how)
            whole = planner.plan(SHAPES[name], ranks=1, stage=0, checkpointing=how)
            assert plan.by_component() == pytest.approx(whole.by_component())


def test_activations_of_a_stage_are_those_of_the_micro_batches_in_flight():
    """96 layers, with the embedding and the output, are 14 links for each of 7 stages."""
    shape, per_layer = SHAPES["GPT-3 175B"], 2048 * 12288 * 34
    own = {"stages": 7, "micro_batches": 28, "attention": "fused"}

    def layers_kept(stage, **how):
        activations = stages.plan_stage(shape, stage=stage, **own, **how).activations
        return activations / per_layer

    assert layers_kept(1) == pytest.approx(6 * 14) and layers_kept(5) == pytest.approx(2 * 14)
    assert layers_kept(1, schedule="gpipe") == pytest.approx(28 * 14)
    assert layers_kept(5, schedule="zero_bubble") == pytest.approx(7 * 14)
    assert layers_kept(1, schedule="interleaved", chunks=2) == pytest.approx((2 * 5 + 7 + 1) / 2 * 14)
    logits = 4 * 2048 * 50257 / per_layer
    assert layers_kept(6) == pytest.approx(13 + logits)
    assert layers_kept(6, schedule="gpipe") == pytest.approx(28 * (13 + logits))


def test_bytes_of_a_boundary_are_those_of_lesson_15():
    shape = SHAPES["Llama-2 70B"]
    assert stages.boundary_bytes(shape, sequence=4096) == 2 * 4096 * 8192
    messages = [stages.messages_of_stage(8, stage, 8) for stage in range(8)]
    assert messages == [8, *[16] * 6, 8] and stages.messages_of_stage(1, 0, 8) == 0
    assert [stages.messages_of_stage(2, stage, 4, chunks=3) for stage in range(2)] == [20, 20]
    assert 16 * stages.boundary_bytes(shape) / GB == pytest.approx(1.07, rel=0.01)


def test_the_table_of_stages_has_a_row_per_stage_and_the_bubble():
    table = stages.stage_table("Llama-2 70B", stages=16, micro_batches=64, checkpointing="full")
    plan = stages.plan_stage(SHAPES["Llama-2 70B"], stages=16, stage=3, micro_batches=64, checkpointing="full")
    assert len(table.rows) == 16 and table.rows[3][0] == "3"
    assert table.rows[3][3] == f"{plan.total_bytes / GB:,.1f}"
    assert "The bubble is 23.4% of the ideal time, and 19.0% of the total time. A message has 67 MB." in table.note


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "fast"}, "schedule must be one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble', got 'fast'"),
        ({"micro_batches": 0}, "stages, micro_batches and chunks must be positive, got 4, 0, 1"),
        ({"schedule": "interleaved", "micro_batches": 6}, "needs a multiple of 4 micro-batches, got 6"),
        ({"chunks": 2}, "only an interleaved schedule has several chunks per stage, got chunks=2"),
        ({"stages": 15}, "14 layers, with embedding and output, cannot be split into 15 chunks"),
        ({"stage": 4}, "stage must be at least 0 and less than 4, got 4"),
        ({"precision": "int4"}, "precision must be one of .*, got 'int4'"),
        ({"attention": "flat"}, "flat"),
    ],
)
def test_a_stage_that_cannot_be_planned_is_rejected_in_one_sentence(wrong, message):
    with pytest.raises(ValueError, match=message):
        stages.plan_stage(SHAPES["GPT-2 124M"], **({"stages": 4, "stage": 1, "micro_batches": 8} | wrong))


# -- real links have sources, and figures that are plausible and agree with what was measured

BY_NAME = {link.name: link for link in REAL_LINKS}


@pytest.mark.parametrize("link", REAL_LINKS, ids=lambda link: link.name)
def test_every_figure_has_a_source(link: RealLink):
    for source in (link.alpha_source, link.bandwidth_source):
        assert re.search(r"issue \d+|commit \w{7}|RFC \d+|as for 100 Gbit/s", source)


@pytest.mark.parametrize("link", REAL_LINKS, ids=lambda link: link.name)
def test_no_adapter_is_faster_than_its_rate(link: RealLink):
    adapters = re.search(r"(?:(\d+) (?:InfiniBand )?adapters? of )?(\d+) Gbit/s", link.name)
    if adapters:
        assert link.bus_bytes_per_s <= int(adapters[1] or 1) * int(adapters[2]) / 8 * GB
    assert 1e-6 < link.alpha_s < 1e-4


def test_names_are_unique():
    assert len(BY_NAME) == len(REAL_LINKS)


def test_all_reduce_follows_the_rings_formula():
    link = BY_NAME["NVLink 4, in a host of 8 H100"]
    expected_s = 2 * 7 * 3.4e-6 + 2 * 7 / 8 * GB / (370 * GB)
    assert link.all_reduce_s(GB, 8) == pytest.approx(expected_s)
    assert link.all_reduce_s(GB, 8) == formulas.ring_all_reduce_s(GB, 8, link.alpha_s, link.beta_s_per_byte)


def test_formula_gives_the_time_that_nccl_tests_measured():
    """NVIDIA/nccl-tests issue 252: 1 GiB on 8 GPUs took 20.1 ms out of place and 19.3 ms in place."""
    link = BY_NAME["InfiniBand, 4 adapters of 200 Gbit/s per host"]
    assert 0.98 * 19.265e-3 < link.all_reduce_s(1 << 30, 8) < 1.02 * 20.079e-3


def test_table_has_a_row_per_link():
    table = link_table()
    assert [row[0] for row in table.rows] == list(BY_NAME)
    assert "all-reduce of 1 GB, ms" in table.header


# -- figures


def bars_of(model, ranks):
    plans = {
        name: planner.plan(SHAPES[model], ranks=ranks, stage=stage, checkpointing="full")
        for stage, name in planner.STAGES.items()
    }
    return plans, planner_plots.stages({name: plan.by_component() for name, plan in plans.items()}, model).axes[0]


def test_bars_are_as_long_as_the_plan_and_lines_mark_the_memory_of_gpus():
    plans, axes = bars_of("Llama-2 7B", 8)
    for y, plan in enumerate(plans.values()):
        bar = [patch for patch in axes.patches if abs(patch.get_y() + patch.get_height() / 2 - y) < 0.1]
        assert sum(patch.get_width() for patch in bar) == pytest.approx(plan.total_bytes / GB)
    assert [line.get_xdata()[0] for line in axes.lines] == [24, 80, 141]
    assert len({line.get_linestyle() for line in axes.lines}) == 3
    assert [label.get_text() for label in axes.get_yticklabels()] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def test_a_bar_that_is_cut_off_is_marked_and_shows_its_total():
    plans, axes = bars_of("Llama-2 70B", 64)
    texts = [text.get_text() for text in axes.texts]
    assert "… 1,116 GB, fits no GPU" in texts and f"{plans['ZeRO-3'].total_bytes / GB:.1f} GB" in texts
    assert max(patch.get_x() + patch.get_width() for patch in axes.patches) <= 1.34 * 141


def test_components_differ_without_color():
    hatches = [hatch for _, hatch in planner_plots.COMPONENT_STYLES.values()]
    assert len(set(hatches)) == len(hatches)


def test_a_figure_without_bars_is_rejected():
    with pytest.raises(ValueError, match="nothing to draw"):
        planner_plots.stages({})


def test_growth_draws_formulas_as_lines_and_measurements_as_marks():
    line = {64: 1000.0, 128: 2000.0}
    axes = planner_plots.activation_growth({"a": line, "b": line}, {"a": {64: 1000.0}, "c": {64: 500.0}}).axes[0]
    labels = [drawn.get_label() for drawn in axes.lines]
    assert labels == ["a, formula", "a, measured", "b, formula", "c, measured"]
    assert list(axes.lines[0].get_ydata()) == [1.0, 2.0]
    assert axes.lines[1].get_linestyle() == "None" and axes.lines[0].get_color() == axes.lines[1].get_color()


# -- the widget


def test_without_jupyterlab_only_the_figure_is_shown(displayed):
    axes = widgets.memory_planner("Llama-2 7B", ranks=8).axes[0]
    assert displayed == []
    setting = "mixed, 16 bytes per parameter\nmicro-batch 1, checkpointing: full, attention: fused"
    assert axes.get_title() == f"Llama-2 7B, 8 ranks, {setting}"


def test_a_dropdown_redraws_what_the_pure_function_draws(displayed, with_a_reader):
    figure = widgets.memory_planner("Llama-2 7B", ranks=8)
    [box] = displayed
    dropdowns, picture = {dropdown.description: dropdown for dropdown in box.children[0].children}, box.children[1]
    assert list(dropdowns) == ["model", "ranks", "precision", "micro-batch", "checkpointing", "attention"]
    assert picture.value == widgets.as_png(figure)
    dropdowns["model"].value, dropdowns["micro-batch"].value = "Llama-3 70B", 4
    rest = {"ranks": 8, "precision": "mixed, 16 bytes per parameter", "checkpointing": "full", "attention": "fused"}
    assert picture.value == widgets.as_png(widgets.planned(model="Llama-3 70B", micro_batch=4, **rest))


@pytest.mark.parametrize("wrong", [{"model": "GPT-4"}, {"ranks": 3}, {"precision": "int4"}, {"micro_batch": 0}])
def test_a_choice_that_is_not_offered_is_rejected(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        widgets.memory_planner(**wrong)
