"""For any model and cluster, formulas, planner and dry run agree with one another and with direct counting."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared import dryrun, formulas, planner
from shared.dryrun.decoder import Decoder
from shared.formulas import BytesPerParameter
from shared.planner.shapes import ModelShape
from solutions.memory_wall import activation_peak_bytes, place_checkpoints
from tests.drawn import tried

counts, ranks, few = st.integers(1, 10**12), st.integers(1, 10_000), st.integers(1, 8)
stages = st.sampled_from(formulas.ZERO_STAGES)
each_bytes = st.builds(BytesPerParameter, few, few, st.integers(0, 16))


def about(number) -> object:
    return pytest.approx(float(number), rel=1e-12)


# -- memory


@tried(200)
@given(counts, ranks, stages, each_bytes)
def test_state_is_the_sum_of_its_kinds_and_all_ranks_together_hold_all_of_it(parameters, size, stage, each):
    kinds = [replace(BytesPerParameter(0, 0, 0), **{kind: getattr(each, kind)}) for kind in each.__dict__]
    held = [formulas.model_state_bytes(parameters, size, stage, kind) for kind in kinds]
    assert sum(held) == about(formulas.model_state_bytes(parameters, size, stage, each))
    copies = [1 if sharded else size for sharded in (stage >= 3, stage >= 2, stage >= 1)]
    for total_bytes, kind, copied in zip(held, kinds, copies, strict=True):
        assert size * total_bytes == about(parameters * kind.total * copied)


@tried(200)
@given(counts, ranks, ranks, stages, each_bytes)
def test_more_ranks_and_higher_stages_hold_no_more(parameters, one, other, stage, each):
    fewer, more = sorted((one, other))
    held = [formulas.model_state_bytes(parameters, more, each_stage, each) for each_stage in formulas.ZERO_STAGES]
    assert held == sorted(held, reverse=True)
    assert held[stage] <= formulas.model_state_bytes(parameters, fewer, stage, each)
    assert held[0] == formulas.model_state_bytes(parameters, 1, stage, each) == parameters * each.total
    assert formulas.memory_saving(more, stage, each) == about(held[0] / held[stage])


@tried(100)
@given(st.lists(counts, min_size=1, max_size=8), ranks, few, st.integers(0, 8))
def test_prefetching_holds_more_up_to_everything(units, size, bytes_each, prefetch):
    peaks = [formulas.zero3_parameter_peak_bytes(units, size, bytes_each, ahead) for ahead in (prefetch, prefetch + 1)]
    shards_bytes = bytes_each * Fraction(sum(units), size)
    assert shards_bytes + bytes_each * max(units) <= peaks[0] * (1 + 1e-12)
    assert peaks[0] <= peaks[1] <= float(shards_bytes + bytes_each * sum(units)) * (1 + 1e-12)
    if prefetch >= len(units) - 1:
        assert peaks[0] == about(shards_bytes + bytes_each * sum(units))


# -- the wire


@tried(200)
@given(counts, ranks, few, few)
def test_bytes_on_the_wire_add_up(parameters, size, bytes_each, micro_batches):
    """Fractions count exactly, where floats would lose a remainder."""
    buffer_bytes = parameters * bytes_each
    once = Fraction((size - 1) * buffer_bytes, size)
    assert formulas.reduce_scatter_sent_bytes(buffer_bytes, size) == about(once)
    assert formulas.all_gather_sent_bytes(buffer_bytes, size) == about(once)
    assert formulas.all_reduce_sent_bytes(buffer_bytes, size) == about(2 * once)
    passes = [2, 2, 1 + micro_batches, 3 * micro_batches]  # ZeRO-2 reduces each micro-batch; ZeRO-3 also gathers twice
    sent = [formulas.step_sent_bytes(parameters, size, stage, bytes_each, micro_batches) for stage in range(4)]
    assert sent == [about(times * once) for times in passes]


picoseconds = st.integers(0, 10**9).map(lambda count: 1e-12 * count)  # up to a millisecond


@tried(100)
@given(counts, st.integers(0, 12).map(lambda log: 2**log), picoseconds, picoseconds)
def test_no_algorithm_beats_the_bytes_of_a_ring_or_the_rounds_of_a_tree(nbytes, size, alpha_s, beta_s):
    ring_s = formulas.ring_all_reduce_s(nbytes, size, alpha_s, beta_s)
    tree_s = formulas.tree_all_reduce_s(nbytes, size, alpha_s, beta_s)
    both_s = formulas.halving_doubling_all_reduce_s(nbytes, size, alpha_s, beta_s)
    assert both_s <= min(ring_s, tree_s) * (1 + 1e-9)
    assert formulas.ring_all_gather_s(nbytes, size, alpha_s, beta_s) == about(ring_s / 2)


times_s = st.integers(0, 100).map(float)


@tried(200)
@given(st.lists(st.tuples(times_s, times_s), max_size=8), times_s)
def test_exposed_time_is_determined_by_the_bucket_that_delays_the_end_most(buckets, backward_end_s):
    """The end is the latest time at which any bucket is ready, plus the time of this bucket and all later ones."""
    ready_s, lasts_s = [ready for ready, _ in buckets], [lasts for _, lasts in buckets]
    ends_s = [ready + sum(lasts_s[index:]) for index, ready in enumerate(ready_s)]
    exposed_s = formulas.exposed_s(ready_s, lasts_s, backward_end_s)
    assert exposed_s == max(0.0, max(ends_s, default=0.0) - backward_end_s)


@tried(100)
@given(few, st.integers(1, 64), few)
def test_chunks_divide_the_bubble(stages, rounds, chunks):
    micro_batches = stages * rounds
    ideal = formulas.bubble_over_ideal(stages, micro_batches)
    assert formulas.bubble_over_ideal(stages, micro_batches, chunks) == about(ideal / chunks)


# -- activations

blocks = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=5)


@tried(150)
@given(blocks, st.integers(0, 200))
def test_checkpoints_are_the_fewest_that_reach_the_target(blocks, target_bytes):
    saved, given_ = [each[0] for each in blocks], [each[1] for each in blocks]
    choices = [chosen for count in range(len(saved) + 1) for chosen in combinations(range(len(saved)), count)]
    enough = [chosen for chosen in choices if peak_of(saved, given_, chosen) <= target_bytes]
    assert all(activation_peak_bytes(saved, given_, each) == peak_of(saved, given_, each) for each in choices)
    if not enough:
        with pytest.raises(ValueError, match="the lowest possible peak is"):
            place_checkpoints(saved, given_, target_bytes)
        return
    chosen = place_checkpoints(saved, given_, target_bytes)
    assert chosen in enough and len(chosen) == min(map(len, enough))


def peak_of(saved: list[int], given_: list[int], chosen: tuple[int, ...]) -> int:
    """Compute the peak during backward: later blocks are freed, and a checkpointed block is fully recomputed."""
    kept = [given_[index] if index in chosen else saved[index] for index in range(len(saved))]
    held = [sum(kept[: index + 1]) + (saved[index] if index in chosen else 0) for index in range(len(saved))]
    return max(held, default=0)


# -- planner and dry run


@st.composite
def model_shapes(draw, most_layers: int = 4) -> ModelShape:
    kv_heads, repeats, head_width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads = kv_heads * repeats
    sizes = {"vocabulary": draw(st.integers(1, 60)), "context": draw(st.integers(1, 16))}
    family = {name: draw(st.booleans()) for name in ("gated", "tied", "biases", "learned_positions")}
    layers, ffn = draw(st.integers(1, most_layers)), draw(st.integers(1, 40))
    return ModelShape("drawn", layers, heads * head_width, heads, kv_heads, ffn, **sizes, **family)


@tried(60)
@given(model_shapes())
def test_a_shape_counts_the_parameters_of_its_decoder(shape):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Decoder(shape).parameters()) == shape.parameters


@tried(150)
@given(model_shapes(200), ranks, stages, st.sampled_from(list(planner.PRECISIONS)), few)
def test_a_plan_adds_up_and_grows_with_the_model_and_the_micro_batch(shape, size, stage, precision, micro_batch):
    options = {"precision": precision, "micro_batch": micro_batch}
    plan = planner.plan(shape, ranks=size, stage=stage, **options)
    state = planner.PRECISIONS[precision].state
    assert plan.total_bytes == about(sum(plan.by_component().values())) and min(plan.by_component().values()) >= 0
    state_bytes = plan.parameters + plan.gradients + plan.optimizer
    assert state_bytes == about(formulas.model_state_bytes(shape.parameters, size, stage, state))
    assert planner.plan(shape, ranks=size + 1, stage=stage, **options).total_bytes <= plan.total_bytes * (1 + 1e-12)
    larger = planner.plan(shape, ranks=size, stage=stage, **{**options, "micro_batch": 2 * micro_batch})
    assert larger.activations == about(2 * plan.activations)
    none, selective, full = activations_of(shape, size, stage, options)
    assert none >= selective >= full
    one_layer = activations_of(replace(shape, layers=1), size, stage, options)
    assert one_layer == [about(one_layer[0])] * 3, "a layer that is recomputed holds all its activations for a while"


def activations_of(shape: ModelShape, size: int, stage: int, options: dict) -> list[float]:
    """Return the bytes of activations for each kind of checkpointing."""
    ways = [{"checkpointing": how, **options} for how in planner.CHECKPOINTING]
    return [planner.plan(shape, ranks=size, stage=stage, **way).activations for way in ways]


@pytest.fixture(scope="module")
def other_process():
    """A process in which a dry run may create a process group."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def dry(shape: ModelShape, strategy: str, size: int) -> tuple[float, int, int, int]:
    """Do a dry run. Returns the bytes sent, the most optimizer bytes, the bytes at the peak, and the messages."""
    run = dryrun.dry_run(shape, strategy, size)
    return run.sent_bytes, run.most_bytes("optimizer"), run.at_peak.total_bytes, run.messages


KEEPING_LAYERS = [
    name for name, strategy in dryrun.strategies().items() if not strategy.splits_layers and not strategy.shards_experts
]


@pytest.mark.exhaustive
@tried(15)
@given(model_shapes(), st.integers(1, 64), st.sampled_from(KEEPING_LAYERS))
def test_a_dry_run_holds_and_sends_what_the_formulas_say(other_process, shape, size, strategy):
    stage = dryrun.strategies()[strategy].stage
    sent_bytes, optimizer_bytes, peak_bytes, messages = other_process.submit(dry, shape, strategy, size).result(120)
    # A flat tensor has less than one element of padding per rank, and is sent at least twice. All-reduces have none.
    padded = shape.parameters + (messages // 2 * size if stage else 0)
    kinds = BytesPerParameter(0, 0, 8 if stage == 3 else 12)
    counters_bytes = 4 * 100  # Adam's step counters
    least_bytes = formulas.model_state_bytes(shape.parameters, size, stage, kinds)
    most_bytes = formulas.model_state_bytes(padded, size, stage, kinds)
    assert least_bytes * (1 - 1e-12) <= optimizer_bytes <= most_bytes + counters_bytes
    assert optimizer_bytes < peak_bytes
    sent = [formulas.step_sent_bytes(count, size, stage) for count in (shape.parameters, padded)]
    root = shape.embedding_parameters + shape.output_parameters if stage == 3 else 0  # all-gathered only once
    assert sent[0] - formulas.all_gather_sent_bytes(2 * root, size) <= sent_bytes * (1 + 1e-12)
    assert sent_bytes <= sent[1] * (1 + 1e-12)
