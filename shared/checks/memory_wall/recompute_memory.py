"""Judge what a checkpointed module keeps between forward and backward.

The bytes of storages are counted, because autograd keeps the tensors that it saves in C++.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.memory_wall.recompute_values import after_values

SAMPLES, INPUTS = 32, 256
SLACK_BYTES = 16_384  # saved states of random number generators, about 5,000 bytes each


class Wide(nn.Module):
    """Keep several tensors of [32, width] for backward, computed from two inputs."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(INPUTS, width), nn.Linear(width, width), nn.Linear(width, INPUTS)

    def forward(self, x, y):
        return self.down(F.gelu(self.middle(F.gelu(self.up(x * y)))))


def probe_kept(checkpointed, width: int, checkpoints: bool) -> dict:
    """Run forward and backward twice. Return how many more bytes live after each than before, without the results."""
    block = Wide(width).to(device_here())
    model = checkpointed(block) if checkpoints else block
    found = {"forward": [], "backward": []}
    for _ in range(2):
        x, y = (torch.randn(SAMPLES, INPUTS, device=device_here(), requires_grad=True) for _ in range(2))
        for each in (*block.parameters(), x, y):
            each.grad = torch.zeros_like(each)
        own = {"other": [*block.parameters(), *(p.grad for p in block.parameters()), x, y, x.grad, y.grad]}
        with memory.peak(model, extra=own) as peak:
            output = model(x, y)
        found["forward"].append(_grown(peak) - output.nbytes)
        with memory.peak(model, extra=own) as peak:
            output.sum().backward()
            output = None
        found["backward"].append(_grown(peak))
    return found


def _grown(peak: memory.Peak) -> int:
    return peak.samples[-1].held.total_bytes - peak.samples[0].held.total_bytes


@after_values
def only_inputs_are_kept(attempt: Attempt) -> None:
    width = attempt.random.randint(450, 600)
    plain_bytes = attempt.run(probe_kept, width, False)[0]["forward"][0]
    for rank, found in enumerate(attempt.run(probe_kept, width, True)):
        for number, kept_bytes in enumerate(found["forward"], 1):
            if kept_bytes > SLACK_BYTES:
                evidence = (
                    f"a module that keeps {plain_bytes:,} bytes of activations: when checkpointed, it keeps "
                    f"{kept_bytes:,} "
                    f"bytes besides its inputs and its output after forward {number}; expected none"
                )
                raise Wrong({rank: evidence}, "Hint: what does autograd record during forward, and what else is saved?")
        for number, kept_bytes in enumerate(found["backward"], 1):
            if kept_bytes > SLACK_BYTES:
                evidence = f"{kept_bytes:,} more bytes are held after backward {number} than before it; expected none"
                raise Wrong({rank: evidence}, "Hint: which tensor of forward or the recomputation do you still hold?")


def probe_left(checkpointed, width: int) -> int:
    """Train once, then drop inputs and gradients. Return the bytes that still live besides the loss."""
    model = checkpointed(Wide(width).to(device_here()))
    leaf = torch.zeros(1, device=device_here(), requires_grad=True)  # A graph keeps its leaves alive.
    before_bytes = living_bytes()

    def forward() -> torch.Tensor:
        return model(*(torch.randn(SAMPLES, INPUTS, device=device_here()) + leaf for _ in range(2))).sum()

    loss = forward()
    loss.backward()
    model.zero_grad()
    return living_bytes() - before_bytes - loss.nbytes


@after_values
def nothing_is_left(attempt: Attempt) -> None:
    width = attempt.random.randint(450, 600)
    for rank, left_bytes in enumerate(attempt.run(probe_left, width)):
        if left_bytes > SLACK_BYTES:
            evidence = (
                f"{left_bytes:,} bytes are still held after backward, although inputs and gradients were "
                "deleted; expected none "
                f"(the two inputs had {2 * SAMPLES * INPUTS * 4:,} bytes)"
            )
            raise Wrong({rank: evidence}, "Hint: where do you save the inputs, and can autograd free them there?")
