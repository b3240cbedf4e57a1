"""For random models, optimizers and world sizes, ZeRO trains as one process does, and holds and sends its share.

The functions without `test_` run on the ranks.
"""

import tempfile
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from shared import formulas, memory, wire
from solutions.model_state import begin_state
from solutions.strategies import STRATEGIES
from tests.drawn import trainings, tried, worlds
from tests.drawn_trainings import ZERO, Model, Rank, Training, alone

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("zero1", "zero2", "zero3", "fsdp")]

TOLERANCE = 1e-9  # Adam turns a rounding of 1e-16 in a gradient into 1e-16 / eps, a few times over.
EPS = 1e-6  # of a byte, because formulas divide
FLOAT64_ADAM = formulas.BytesPerParameter(8, 8, 16)


def close(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=TOLERANCE)


# -- values


def trained(group, training: Training) -> tuple[dict, list[float]]:
    rank = Rank(group, training)
    rank.train()
    return rank.whole_state(), rank.norms


@tried(60)
@given(worlds(), trainings(ZERO))
def test_parameters_equal_those_of_one_process(four_ranks, world, training):
    module, _, norms = alone(training)
    for state, its_norms in world.run(trained, training):
        close(state, dict(module.state_dict()))
        close(its_norms, norms)


# -- states


def saved(group, training: Training, steps: range, folder: str) -> tuple[dict, dict | None]:
    """Train, and save. Return the parameters and, except for ZeRO-3, the optimizer's state as one process has it."""
    rank = Rank(group, training)
    rank.train(steps)
    if training.wrapper == "zero3":
        dcp.save(rank.model.sharded_state_dict(rank.optimizer), checkpoint_id=folder, process_group=group)
        return rank.whole_state(), None
    return rank.whole_state(), rank.groups.state_dict()


def resumed(group, training: Training, steps: range, folder: str, parameters: dict, state: dict | None) -> dict:
    """Load what was saved, and train on. Return the parameters."""
    rank = Rank(group, replace(training, net=replace(training.net, seed=training.net.seed + 99)))
    if state is None:
        begin_state(rank.optimizer)
        dcp.load(rank.model.sharded_state_dict(rank.optimizer), checkpoint_id=folder, process_group=group)
    else:
        rank.module.load_state_dict(parameters)
        rank.groups.load_state_dict(state)
    rank.train(steps)
    return rank.whole_state()


@tried(30)
@given(worlds(), worlds(), trainings(ZERO, least_steps=2), st.integers(0, 3))
def test_another_number_of_ranks_resumes_a_saved_training(four_ranks, world, other, training, cut):
    least = 1 if training.wrapper == "zero3" else 0  # DCP cannot save a state that does not exist yet.
    cut = max(least, min(cut, len(training.rates)))
    steps = range(cut), range(cut, len(training.rates))
    with tempfile.TemporaryDirectory() as folder:
        parameters, state = world.run(saved, training, steps[0], folder)[0]
        found = other.run(resumed, training, steps[1], folder, parameters, state)
    for each in found:
        close(each, dict(alone(training)[0].state_dict()))
    if state is not None:
        close(tensors_of(state), tensors_of(alone(training, steps[0])[1].state_dict()))


def tensors_of(state_dict: dict) -> dict:
    """Return a state without its settings, and without entries of None, such as an unused momentum."""
    states = state_dict["state"].items()
    return {number: {name: v for name, v in state.items() if v is not None} for number, state in states}


# -- bytes held and sent


@dataclass(frozen=True)
class Measured:
    sent_bytes: float  # in a whole step
    held: memory.Held  # before the optimizer's step, when it has its state
    parameters_peak_bytes: int
    gradients_peak_bytes: int  # including buckets in flight
    flats: list[int]  # elements in each sharded flat tensor, the root's last


def measured(group, training: Training) -> Measured:
    """Measure the second step, because the first one creates the optimizer's state."""
    rank = Rank(group, training)
    rank.train(range(1))
    with wire.ledger() as log, memory.peak(rank.model, rank.optimizer) as peak:
        rank.backward(1)
        if training.max_norm:
            rank.clip()
        getattr(rank.optimizer, "reduce_gradients", lambda: None)()  # Otherwise, ZeRO-1's may still be in flight.
        held = memory.held(rank.model, rank.optimizer)
        rank.step(1)
    samples = [sample.held for sample in peak.samples]
    return Measured(
        log.sent_bytes,
        held,
        max(each.parameters_bytes for each in samples),
        max(each.gradients_bytes + each.buckets_bytes for each in samples),
        flats_of(rank),
    )


def flats_of(rank: Rank) -> list[int]:
    owner = rank.model if rank.training.wrapper == "zero3" else rank.groups
    return [flat_parameter.layout.numel for flat_parameter in owner.flat_parameters]


def padded(flats: list[int], size: int) -> int:
    """Return the number of elements when each flat tensor is padded to a multiple of the world size."""
    return sum(-(-numel // size) * size for numel in flats)


def measuring(wrapper: str, **options) -> st.SearchStrategy[Training]:
    drawn = trainings([wrapper], optimizers=("Adam",), **options)
    return drawn.map(lambda each: replace(each, rates=(0.1, 0.1), options=(("eps", 1e-3),)))


def numel_of(net, trained: bool) -> int:
    return sum(each.numel() for each in Model(net).parameters() if each.requires_grad is trained)


def using_everything(training: Training) -> Training:
    """Let samples use each block, because an optimizer has no state for a parameter without gradients."""
    blocks = tuple(replace(block, road="all" if block.road == "none" else block.road) for block in training.net.blocks)
    return replace(training, net=replace(training.net, blocks=blocks))


@tried(30)
@given(worlds(), st.sampled_from(["zero1", "zero2"]).flatmap(measuring).map(using_everything))
def test_stages_1_and_2_hold_and_send_what_the_formulas_say(four_ranks, world, training):
    size, stage = len(world.ranks), STRATEGIES[training.wrapper].stage
    numel, frozen = numel_of(training.net, True), numel_of(training.net, False)
    times = 1 if training.no_sync else training.accumulate
    for found in world.run(measured, training):
        assert sum(found.flats) == numel
        whole = padded(found.flats, size)
        norm_bytes = 2 * formulas.all_reduce_sent_bytes(8, size) if training.max_norm else 0  # two clippings
        sent_bytes = formulas.step_sent_bytes(whole, size, stage, 8, times) + norm_bytes
        assert found.sent_bytes == pytest.approx(sent_bytes, rel=1e-12)
        least_bytes, most_bytes = (formulas.model_state_bytes(n, size, stage, FLOAT64_ADAM) for n in (numel, whole))
        counters_bytes = 4 * len(found.flats)  # Adam's step counters
        assert least_bytes - EPS <= found.held.total_bytes - 8 * frozen - counters_bytes <= most_bytes + EPS


@tried(25)
@given(worlds(), measuring("zero3", plain=True))
def test_stage_3_holds_and_sends_what_the_formulas_say(four_ranks, world, training):
    size, numel = len(world.ranks), numel_of(training.net, True)
    for found in world.run(measured, training):
        *blocks, root = [padded([each], size) for each in found.flats]
        assert sum(found.flats) == numel and len(blocks) == len(training.net.blocks)
        resharded = 3 if training.reshard_after_forward else 2
        passes = training.accumulate * (2 * root + resharded * sum(blocks))
        norm_bytes = 2 * formulas.all_reduce_sent_bytes(8, size) if training.max_norm else 0
        sent_bytes = formulas.reduce_scatter_sent_bytes(8 * passes, size) + norm_bytes
        assert found.sent_bytes == pytest.approx(sent_bytes, rel=1e-12)
        least_bytes = formulas.model_state_bytes(numel, size, 3, FLOAT64_ADAM)
        most_bytes = formulas.model_state_bytes(root + sum(blocks), size, 3, FLOAT64_ADAM)
        assert least_bytes - EPS <= found.held.total_bytes - 4 * len(found.flats) <= most_bytes + EPS


@tried(15)
@given(worlds(), st.sampled_from(["zero2", "zero3"]).flatmap(lambda each: measuring(each, plain=True)))
def test_temporary_full_tensors_stay_within_the_documented_peak(four_ranks, world, training):
    """Allow gradients three buckets or units, one gradient, and two shards for sums.

    Allow ZeRO-3's parameters the root, the unit that computes, and the prefetched units.
    """
    training, size = replace(training, no_sync=False), len(world.ranks)  # Inside no_sync(), gradients stay unsharded.
    largest = max(each.numel() for each in Model(training.net).parameters())
    for found in world.run(measured, training):
        flats = [padded([each], size) for each in found.flats]
        in_flight = (3 + 2 / size) * max(flats) + largest
        assert found.gradients_peak_bytes <= 8 * (sum(flats) / size + in_flight) + EPS
        *units, root = flats
        if training.wrapper == "zero3" and units and training.reshard_after_forward:
            least_bytes = formulas.zero3_parameter_peak_bytes(units, size, 8)
            most_bytes = formulas.zero3_parameter_peak_bytes(units, size, 8, training.prefetch)
            root_bytes = 8 * root * (1 + 1 / size)
            assert least_bytes - EPS <= found.parameters_peak_bytes - root_bytes <= most_bytes + EPS
