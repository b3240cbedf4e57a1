"""DeepSpeed behind the course's step: it trains as one process would, keeps to itself, and refuses in one sentence.

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
    """→ losses, bytes sent in the last step, the optimizer's bytes after it, whether torch's linear is still torch's"""
    torchs_linear = nn.functional.linear
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
    return losses, log.sent_bytes, held, nn.functional.linear is torchs_linear


def one_process(optimizer_cls=torch.optim.AdamW, largest_norm: float = float("inf")) -> list[float]:
    model = new_model()
    optimizer, losses = optimizer_cls(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module", params=[1, 2, 3])
def world_size(request):
    ranks.start(request.param)
    yield request.param
    ranks.stop()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_trains_as_one_process_on_the_full_batch(world_size, stage):
    found = ranks.run(trained, stage, timeout_s=scaled(120))
    numbers = sum(parameter.numel() for parameter in new_model().parameters())
    once = formulas.ring_fraction(world_size) * 4 * numbers
    for losses, sent_bytes, optimizer_bytes, linear_is_torchs in found:
        assert losses == pytest.approx(one_process(), abs=1e-6) and losses[-1] < losses[0]
        # Stages 1 and 2 all-reduce the gradients (2), of which a rank needs a part, and gather parameters (1). Stage 3
        # gathers twice and reduce-scatters, less the root's own second gather: nothing is registered with the root.
        assert sent_bytes == pytest.approx(3 * once, rel=0.02, abs=64)
        bytes_each = 12 if stage < 3 else 8  # stages 1 and 2 keep masters, even of parameters that are fp32
        assert optimizer_bytes == pytest.approx(bytes_each * numbers / world_size, rel=0.01, abs=64)
        assert linear_is_torchs


def test_gradients_are_clipped_as_asked_for(world_size):
    """With SGD: AdamW hardly knows how long a gradient is."""
    expected = one_process(torch.optim.SGD, largest_norm=0.1)
    assert expected[-1] != pytest.approx(one_process(torch.optim.SGD, largest_norm=1.0)[-1], abs=1e-3)
    for losses, *_ in ranks.run(trained, 2, torch.optim.SGD, gradient_clipping=0.1, timeout_s=scaled(120)):
        assert losses == pytest.approx(expected, abs=1e-5)


def test_other_stages_are_refused():
    for stage in (0, 4):
        with pytest.raises(ValueError, match=f"stages 1, 2 and 3, got {stage}"):
            deepspeed_engine.engine(new_model(), stage, torch.optim.AdamW)


def test_without_deepspeed_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in deepspeed_engine.why_not()
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="DeepSpeed is not installed"):
        deepspeed_engine.engine(new_model(), 1, torch.optim.AdamW)
    assert dict(os.environ) == before
