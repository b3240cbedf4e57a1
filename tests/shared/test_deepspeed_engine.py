"""DeepSpeed with the course's training step: it trains like one process, and does not change other models.

The functions without `test_` run on the ranks.
"""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import deepspeed_engine, formulas, memory, ranks, wire
from shared.deadlines import scaled

pytestmark = [pytest.mark.slow, pytest.mark.chapter("production")]

STEPS, SAMPLES = 4, 12


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1, bias=False))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 9, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def trained(stage: int, optimizer_cls=torch.optim.AdamW, **more) -> tuple[list[float], float, int, bool]:
    """Return the losses, the last step's sent bytes, the optimizer's bytes, and whether torch's linear is intact."""
    original_linear = nn.functional.linear
    model, optimizer = deepspeed_engine.engine(new_model(), stage, optimizer_cls, lr=1e-2, **more)
    losses = []
    for step in range(STEPS):
        x, y = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in batch(step))
        with wire.ledger() as log:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        losses.append(loss.item())
    held = memory.held(model, optimizer).optimizer_bytes
    return losses, log.sent_bytes, held, nn.functional.linear is original_linear


def one_process(optimizer_cls=torch.optim.AdamW, max_norm: float = float("inf")) -> list[float]:
    model = new_model()
    optimizer, losses = optimizer_cls(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def three_ranks():
    """Three ranks for all world sizes, because each rank needs seconds to import DeepSpeed."""
    ranks.start(3)
    yield
    ranks.stop()


@pytest.fixture(scope="module", params=[3, 2, 1])  # in this order, because ranks must have built equally many engines
def world_size(request, three_ranks):
    with ranks.world(request.param):
        yield request.param


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_trains_like_one_process_on_the_full_batch(world_size, stage):
    results = ranks.run(trained, stage, timeout_s=scaled(120))
    elements = sum(parameter.numel() for parameter in new_model().parameters())
    all_gather_bytes = formulas.ring_fraction(world_size) * 4 * elements
    for losses, sent_bytes, optimizer_bytes, linear_is_original in results:
        assert losses == pytest.approx(one_process(), abs=1e-6) and losses[-1] < losses[0]
        # Stages 1 and 2 all-reduce the gradients, which sends twice the bytes of an all-gather, and all-gather the
        # parameters. Stage 3 all-gathers twice and reduce-scatters. It would gather the root module's own parameters
        # only once, but the root has none.
        assert sent_bytes == pytest.approx(3 * all_gather_bytes, rel=0.02, abs=64)
        bytes_per_element = 12 if stage < 3 else 8  # stages 1 and 2 keep master copies, even of fp32 parameters
        assert optimizer_bytes == pytest.approx(bytes_per_element * elements / world_size, rel=0.01, abs=64)
        assert linear_is_original


@pytest.mark.exhaustive
def test_gradients_are_clipped_to_the_given_norm(world_size):
    """SGD shows this, because the norm of the gradients hardly changes a step of AdamW."""
    expected = one_process(torch.optim.SGD, max_norm=0.1)
    assert expected[-1] != pytest.approx(one_process(torch.optim.SGD, max_norm=1.0)[-1], abs=1e-3)
    for losses, *_ in ranks.run(trained, 2, torch.optim.SGD, gradient_clipping=0.1, timeout_s=scaled(120)):
        assert losses == pytest.approx(expected, abs=1e-5)


def test_the_config_disables_clipping_unless_it_is_left_to_deepspeed():
    assert deepspeed_engine.config(2)["gradient_clipping"] == 0.0
    assert "gradient_clipping" not in deepspeed_engine.config(2, gradient_clipping=None)


def test_other_stages_are_rejected():
    for stage in (0, 4):
        with pytest.raises(ValueError, match=f"stage must be 1, 2 or 3, got {stage}"):
            deepspeed_engine.engine(new_model(), stage, torch.optim.AdamW)


def test_message_without_deepspeed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in deepspeed_engine.why_not()
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="DeepSpeed is not installed"):
        deepspeed_engine.engine(new_model(), 1, torch.optim.AdamW)
    assert dict(os.environ) == before
