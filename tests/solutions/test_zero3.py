"""ZeRO3 as a whole: copied, saved, resumed on other numbers of ranks, in bfloat16, in awkward graphs, next to FSDP2.

The functions without `test_` run on the ranks.
"""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shared import models, ranks, wire
from solutions.memory_wall import Checkpointed
from solutions.model_state import begin_state
from solutions.zero3 import ZeRO3

pytestmark = pytest.mark.chapter("zero3", "fsdp")

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}  # A large eps keeps values near 0 from becoming a step of lr.
SAMPLES = 12


@pytest.fixture(params=[1, 2, 3])
def world(request, four_ranks):
    with ranks.world(request.param):
        yield request.param


def tiny_gpt(seed: int, dtype=torch.float64) -> models.TinyGPT:
    """Build a model with a frozen norm, a buffer, and no size that is divisible by three."""
    gpt = models.TinyGPT(models.GPTConfig(vocab_size=13, context=8, layers=2, heads=2, width=10), seed).to(dtype)
    gpt.blocks[0].requires_grad_(False).attention.requires_grad_(True)
    gpt.register_buffer("count", torch.tensor(3.0 + seed))
    return gpt


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of a step's samples, which are the same for any number of ranks."""
    tokens = torch.randint(13, (SAMPLES, 9), generator=torch.Generator().manual_seed(step))
    own = tokens[dist.get_rank() :: dist.get_world_size()]
    return own[:, :-1], own[:, 1:]


def new_optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **SETTINGS)


def train(model, optimizer, steps: range) -> list[float]:
    """Train, and return the losses on this rank's samples."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch_of(step))
        loss.backward()
        if isinstance(model, ZeRO3):
            model.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(one: dict, other: dict) -> None:
    """Compare states with a tolerance for float64 sums in another order."""
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-10)


def round_trip() -> tuple[list[dict], list[str], str]:
    """Return the full states of a trained wrapper and of one that loaded its state_dict(), names, and an error."""
    model, other = ZeRO3(tiny_gpt(0)), ZeRO3(tiny_gpt(5))
    train(model, new_optimizer(model), range(3))
    state = copy.deepcopy(model.state_dict())
    other.load_state_dict(state)
    with pytest.raises(RuntimeError) as rejected:
        other.load_state_dict({**state, "stranger": torch.ones(1)})
    return [model.full_state_dict(), other.full_state_dict()], list(state), str(rejected.value)


def test_state_dict_holds_this_ranks_shards_and_can_be_loaded(world):
    for (one, other), names, error in ranks.run(round_trip):
        close(one, other)
        assert "module.count" in names
        assert all(name.startswith("shards.") or name in ("module.count", "_extra_state") for name in names)
        assert "stranger" in error


def saved(folder: str) -> dict:
    """Save after two steps, and train three more. Return the full state."""
    model = ZeRO3(tiny_gpt(dist.get_rank()))
    optimizer = new_optimizer(model)
    train(model, optimizer, range(2))
    dcp.save({"zero3": model.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    train(model, optimizer, range(2, 5))
    return model.full_state_dict()


def resumed(folder: str) -> dict:
    """Load what was saved, and train three steps. Return the full state."""
    model = ZeRO3(tiny_gpt(7))
    optimizer = new_optimizer(model)
    begin_state(optimizer)
    dcp.load({"zero3": model.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    train(model, optimizer, range(2, 5))
    return model.full_state_dict()


def test_other_numbers_of_ranks_resume_what_four_ranks_saved(four_ranks, tmp_path):
    expected = ranks.run(saved, str(tmp_path))[0]
    for size in (1, 2, 3):
        with ranks.world(size):
            for state in ranks.run(resumed, str(tmp_path)):
                close(state, expected)


def in_bfloat16() -> dict:
    """Train in float32 and in bfloat16. Return bytes sent per step, dtypes of shards and gradients, and losses."""
    found = {"sent": []}
    for compute_dtype in (None, torch.bfloat16):
        model = ZeRO3(tiny_gpt(0, torch.float32), compute_dtype=compute_dtype)
        optimizer = new_optimizer(model)
        losses = [sum(train(model, optimizer, range(2))) for _ in range(15)]
        with wire.ledger() as log:
            train(model, optimizer, range(1))
        found["sent"].append(log.sent_bytes)
    found["dtypes"] = {p.dtype for p in model.parameters()} | {
        p.grad.dtype for p in model.parameters() if p.requires_grad
    }
    return found | {"losses": losses}


@pytest.mark.exhaustive
def test_bfloat16_halves_the_bytes_sent_and_learns(world):
    for found in ranks.run(in_bfloat16):
        whole, half = found["sent"]
        assert half == whole / 2
        assert found["dtypes"] == {torch.float32}
        assert found["losses"][-1] < 0.9 * found["losses"][0]


def beside_fsdp2(checkpointed: bool) -> tuple[list[dict], list[list[float]]]:
    """Take five steps in float64 with ZeRO3 and with torch's FSDP2. Return the full states and losses."""
    ours, theirs = tiny_gpt(0), tiny_gpt(0)
    for gpt in (ours, theirs) if checkpointed else ():
        gpt.blocks = nn.ModuleList(Checkpointed(block) for block in gpt.blocks)
    model, mesh = ZeRO3(ours), init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*theirs.blocks, theirs):
        fully_shard(each, mesh=mesh)
    losses = [train(each, new_optimizer(each), range(5)) for each in (model, theirs)]
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in theirs.state_dict().items()
    }
    return [model.full_state_dict(), state], losses


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_it_trains_as_fsdp2_does(world, checkpointed):
    for (ours, theirs), losses in ranks.run(beside_fsdp2, checkpointed):
        close(ours, theirs)
        assert losses[0] == pytest.approx(losses[1], abs=1e-10)


# -- awkward graphs


class Branch(nn.Module):
    """Use the second of two layers only if a sample asks for it. The input may need no gradient."""

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.always, self.sometimes, self.inplace = nn.Linear(4, 4), nn.Linear(4, 4), inplace

    def forward(self, x):
        asked = bool((x[:, 0] > 0).any())
        x = x.relu_() if self.inplace else x
        return self.always(x) + self.sometimes(x) if asked else self.always(x)


class Branches(nn.Module):
    """Feed one tensor to several units. With a stem, that tensor needs a gradient."""

    def __init__(self, stem: bool, inplace: bool = False):
        super().__init__()
        self.stem = nn.Linear(4, 4) if stem else nn.Identity()
        self.branches = nn.ModuleList(Branch(inplace) for _ in range(3))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.out(sum(branch(x).tanh() for branch in self.branches))


class Spanned(nn.Module):
    """Put two units into one checkpoint: while backward is in the second, the first is recomputed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        pair = nn.Sequential(*self.blocks[:2])
        return self.blocks[2](checkpoint(pair, x, use_reentrant=False).tanh())


def new_branches(stem: bool) -> nn.Module:
    torch.manual_seed(0)
    return Branches(stem).double()


def new_spanned(_stem: bool) -> nn.Module:
    torch.manual_seed(0)
    return Spanned().double()


def squares_of(step: int) -> list[torch.Tensor]:
    """Return two halves of a batch, of which only the second asks for `sometimes`."""
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + 0.1
    x[:2, 0] *= -1
    return list(x.chunk(2))


def trained_beside(build, stem: bool, prefetch: int) -> dict[str, float]:
    """Train three steps on two ranks and in one process. Return the largest error of each tensor."""
    model = ZeRO3(build(stem), prefetch=prefetch)
    alone = build(stem)
    optimizer, reference_optimizer = new_optimizer(model), new_optimizer(alone)
    for step in range(3):
        halves = squares_of(step)
        optimizer.zero_grad()
        model(halves[dist.get_rank()]).square().mean().backward()
        model.finish_gradient_sync()
        optimizer.step()
        reference_optimizer.zero_grad(set_to_none=False)
        sum(alone(half).square().mean() / 2 for half in halves).backward()
        for parameter in alone.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        reference_optimizer.step()
    found = model.full_state_dict()
    return {name: (found[name] - value).abs().max().item() for name, value in alone.state_dict().items()}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("stem", [True, False], ids=["stem", "no stem"])
def test_branches_with_a_parameter_that_one_rank_does_not_use(four_ranks, stem, prefetch):
    with ranks.world(2):
        for errors in ranks.run(trained_beside, new_branches, stem, prefetch):
            assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_checkpoint_may_span_several_units(four_ranks, prefetch):
    with ranks.world(2):
        for errors in ranks.run(trained_beside, new_spanned, False, prefetch):
            assert max(errors.values()) < 1e-10, errors


def changed_in_place(stem: bool) -> list[str]:
    """Return the errors of ours and of FSDP2 for a unit that changes its input in place."""
    errors = []
    x = squares_of(0)[0].float()
    ours, theirs = Branches(stem, inplace=True), Branches(stem, inplace=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*theirs.branches, theirs):
        fully_shard(each, mesh=mesh)
    for model in (ZeRO3(ours), theirs):
        try:
            model(x)
            errors.append("nothing")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_an_input_that_is_changed_in_place_is_a_clear_error_as_in_fsdp2(world):
    for errors in ranks.run(changed_in_place, True):
        for error in errors:
            assert "modified inplace" in error or "modifying it inplace" in error, error
            assert "custom Function" in error or "replace the inplace operation" in error, error
    for errors in ranks.run(changed_in_place, False):
        assert errors == ["nothing", "nothing"]  # An input that needs no gradient may be changed.


def evaluated_before_finishing() -> list[dict]:
    """Train with and without an evaluation between backward() and finish_gradient_sync(). Return full states."""
    states = []
    for evaluates in (False, True):
        model = ZeRO3(tiny_gpt(0))
        optimizer = new_optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            model(*batch_of(step)).backward()
            if evaluates:
                with torch.no_grad():
                    model(*batch_of(7))
            else:
                model.finish_gradient_sync()
            optimizer.step()
        states.append(model.full_state_dict())
    return states


def test_an_evaluation_before_finishing_changes_nothing(world):
    for one, other in ranks.run(evaluated_before_finishing):
        close(one, other)


def dropped() -> bool:
    """Train a wrapper and delete it. Return whether it was collected."""
    model = ZeRO3(tiny_gpt(0))
    train(model, new_optimizer(model), range(1))
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


def test_an_unused_wrapper_is_garbage_collected(world):
    assert all(ranks.run(dropped))
