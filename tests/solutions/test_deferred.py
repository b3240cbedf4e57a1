"""Deferred initialization: a model that was never whole equals one that was whole, and needs less memory to create.

The functions without `test_` run on the ranks.
"""

import pytest
import torch
import torch.distributed as dist

from shared import memory, ranks
from shared.checks.models import awkward, unit_models
from shared.checks.zero3.deferred import fill, fill_in_place
from solutions.deferred import Materializer, seed_of, seeded
from solutions.zero3 import ZeRO3

pytestmark = [pytest.mark.slow, pytest.mark.chapter("zero3", "fsdp")]

SEED = 3
MODELS = ("Blocks", "Tied", "Frozen", "Few", "Mixed", "Nested", "Twice", "Checkpointed", "Whole")
IN_FLOAT32 = {"prefetch": 0, "compute_dtype": torch.float32}  # the buffers of "Buffered" stay float64, so it cannot


def new_model(name: str, deferred: bool, **options) -> ZeRO3:
    """Build a model on the meta device, or one that is filled with the same values before it is sharded."""
    module = unit_models.build(name, 0, device="meta" if deferred else "cpu")
    if unit_models.KINDS[name].units:
        options["units"] = unit_models.units_of(name, module)
    materializer = Materializer(module, fill, "cpu", SEED)
    if deferred:
        return ZeRO3(module, materializer=materializer, **options)
    for tensor, tensor_name in materializer.name_of.items():
        with seeded(seed_of(SEED, tensor_name), torch.device("cpu")), torch.no_grad():
            fill(tensor_name, tensor)
    return ZeRO3(module, **options)


def train(model: ZeRO3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        optimizer.zero_grad()
        awkward.loss_of(model, x, y).backward()
        model.finish_gradient_sync()
        model.clip_grad_norm_(0.05)
        optimizer.step()


def states_of(name: str, options: dict) -> list[list[dict]]:
    """Return the full states of a model that was whole and of one that was not, before and after training."""
    found = []
    for deferred in (False, True):
        model = new_model(name, deferred, **options)
        start = model.full_state_dict()
        train(model)
        found.append([start, model.full_state_dict()])
    return found


def equal(one: dict, other: dict) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "options"), [(name, {}) for name in (*MODELS, "Buffered")] + [(name, IN_FLOAT32) for name in MODELS]
)
def test_it_trains_exactly_like_a_model_that_was_whole(four_ranks, name, options):
    with ranks.world(2):
        for whole, deferred in ranks.run(states_of, name, options):
            assert all(map(equal, whole, deferred))
            assert not equal(*deferred)


def full_state() -> dict:
    return new_model("Buffered", deferred=True).full_state_dict()


def test_the_initial_values_do_not_depend_on_the_number_of_ranks(four_ranks):
    states = []
    for size in (1, 2, 3, 4):
        with ranks.world(size):
            states += ranks.run(full_state)
    assert all(equal(states[0], state) for state in states[1:])


def loaded() -> list[dict]:
    """Load a trained deferred model's full state into another one, and train both. Return their full states."""
    models = [new_model("Buffered", deferred=True) for _ in range(2)]
    train(models[0])
    models[1].load_full_state_dict(models[0].full_state_dict())
    states = [model.full_state_dict() for model in models]
    for model in models:
        train(model)
    return [*states, *(model.full_state_dict() for model in models)]


def test_another_model_can_load_its_full_state(four_ranks):
    with ranks.world(2):
        for saved, found, trained_on, found_trained in ranks.run(loaded):
            assert equal(saved, found) and equal(trained_on, found_trained)
            assert not equal(saved, trained_on)


def peak_of_creation() -> tuple[int, int, int]:
    """Return the most bytes while a model is created, those of this rank's shards, and those of the largest unit."""
    module = unit_models.build("Deep", 0, device="meta")
    unit_bytes = max(sum(parameter.nbytes for parameter in block.parameters()) for block in module.blocks)
    # The empty tensor tells memory.peak which device to watch.
    with memory.peak(extra={"parameters": [torch.empty(0)]}) as peak:
        model = ZeRO3(module, materializer=Materializer(module, fill_in_place, "cpu"))
    return peak.peak_bytes, sum(shard.nbytes for shard in model.parameters()), unit_bytes


def test_creation_needs_room_for_the_shards_and_one_unit(four_ranks):
    for peak_bytes, shards_bytes, unit_bytes in ranks.run(peak_of_creation):
        assert shards_bytes < peak_bytes < 1.02 * (shards_bytes + unit_bytes)


def parameters_after_creation() -> tuple[bool, bool]:
    """Return whether the parameters are the same objects as before, and whether two modules still share one."""
    module = unit_models.build("Tied", 0, device="meta")
    parameters = list(module.parameters())
    ZeRO3(module, materializer=Materializer(module, fill, "cpu"))
    kept = all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    return kept, module.again.weight is module.into.weight


def test_parameters_stay_the_same_objects(four_ranks):
    assert all(kept and tied for kept, tied in ranks.run(parameters_after_creation))
