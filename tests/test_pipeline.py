"""What the lab's checks leave out: steps that add up, frozen layers, and arguments that cannot work.

The functions without `test_` run on the ranks.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared import ranks
from shared.models import GPTConfig, gpt_layers
from shared.schedules import parse
from solutions.pipeline import Pipeline

pytestmark = pytest.mark.chapter("pipeline_parallel")

CONFIG = GPTConfig(vocab_size=11, context=4, layers=4, heads=2, width=6)


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def differences(schedule: str, frozen: tuple[str, ...], steps: int) -> dict[str, float]:
    """Run steps without zero_grad(). Return by how much each gradient of this stage differs from one process."""
    whole = gpt_layers(CONFIG).double()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    pipeline = Pipeline(copy.deepcopy(whole), schedule, 4, token_loss)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens, targets = torch.randint(11, (2, 8, 4), generator=generator)
        token_loss(whole(tokens), targets).backward()
        pipeline.step(tokens, targets)
    expected = dict(whole.named_parameters())
    found = {}
    for name, parameter in pipeline.stage_parameters().items():
        if expected[name].grad is None or parameter.grad is None:
            found[name] = 0.0 if expected[name].grad is parameter.grad else torch.inf
        else:
            found[name] = (parameter.grad - expected[name].grad).abs().max().item()
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("frozen", [(), ("1.up", "2.attention"), ("0.", "1.", "2."), ("0.token",)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_add_up_as_in_one_process(four_ranks, schedule, frozen, world_size):
    with ranks.world(world_size):
        for found in ranks.run(differences, schedule, frozen or ("none",), 2):
            assert max(found.values()) < 1e-12, found


class Checkpointed(nn.Module):
    """Computes another module, and recomputes it in backward."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed_differences(schedule: str) -> dict[str, float]:
    """Return by how much each gradient differs from one process if the layers in the middle are checkpointed."""
    torch.manual_seed(0)
    middle = [Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))) for _ in range(3)]
    whole = nn.Sequential(nn.Linear(6, 6), *middle, nn.Linear(6, 6)).double()
    pipeline = Pipeline(copy.deepcopy(whole), schedule, 4)
    inputs, targets = torch.randn(2, 8, 6, dtype=torch.float64)
    F.mse_loss(whole(inputs), targets).backward()
    pipeline.step(inputs, targets)
    expected = dict(whole.named_parameters())
    found = pipeline.stage_parameters()
    return {name: (found[name].grad - expected[name].grad).abs().max().item() for name in found}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_checkpointed_layers_get_the_same_gradients(four_ranks, schedule):
    with ranks.world(2):
        for found in ranks.run(checkpointed_differences, schedule):
            assert max(found.values()) < 1e-12, found


def complaint(layers: int, options: dict) -> str:
    try:
        Pipeline([nn.Linear(2, 2) for _ in range(layers)], **options).step(torch.ones(6, 2), torch.ones(6, 2))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (1, {}, "1 layers cannot be split into 2 chunks"),
        (3, {"schedule": "interleaved"}, "3 layers cannot be split into 4 chunks"),
        (4, {"schedule": "interleaved", "micro_batches": 3}, "needs a multiple of 2 micro-batches, .* got 3"),
        (4, {"schedule": "fast"}, "there is no schedule 'fast': choose one of gpipe, 1f1b, interleaved, zero_bubble"),
        (4, {"micro_batches": 4}, "a batch of 6 samples cannot be cut into 4 equal micro-batches"),
        (4, {"schedule": parse("F0 B0\nF0")}, "stage 1 never runs B0"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sent(four_ranks, layers, options, message):
    with ranks.world(2):
        for found in ranks.run(complaint, layers, options):
            assert re.search(message, found), found
