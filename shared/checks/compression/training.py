"""Judge whether a network that is trained with a compressor learns as well as without one."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.compression import hints
from shared.checks.compression.references import Method
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.failures import Wrong

INPUTS, HIDDEN, CLASSES = 20, 48, 6
SAMPLES = 64  # per rank
STEPS, LEARNING_RATE, MOMENTUM = 100, 0.05, 0.9
MARGIN = 1.1  # how many times as large the last loss may be as without compression
SLACK = 0.01  # and what may be added to it, as a part of the first loss


def build(seed: int, hidden: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)
        )


def train(model, module, batch, steps: int) -> list[float]:
    """Train with SGD on one batch. Returns the loss of each step. `model` may be a wrapper of the module."""
    momenta, losses = [torch.zeros_like(p) for p in module.parameters()], []
    for _ in range(steps):
        module.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        if model is not module:
            model.finish_gradient_sync()
        with torch.no_grad():
            for parameter, momentum in zip(module.parameters(), momenta, strict=True):
                momentum.mul_(MOMENTUM).add_(parameter.grad)
                parameter.add_(momentum, alpha=-LEARNING_RATE)
        losses.append(loss.item())
    return losses


# -- on a rank


def probe_training(piece, arguments: tuple, seed: int, hidden: int, steps: int, x, y) -> dict:
    module = build(seed, hidden).to(device_here())
    wrapper = earlier_piece("overlapped_ddp", "OverlappedDDP")
    model = wrapper(module, compressor=piece(*arguments), bucket_cap_mb=0.01)
    losses = train(model, module, (x.to(device_here()), y.to(device_here())), steps)
    return {"losses": losses, "state": {name: p.detach().cpu() for name, p in module.named_parameters()}}


# -- in the kernel


def judge_learning(attempt: Attempt, method: Method) -> None:
    """Compare the last loss with that of one process that sends nothing."""
    seed, size = attempt.draw_seed(), attempt.world_size
    hidden, steps = attempt.sizes.pick(HIDDEN, range(30, 90)), attempt.sizes.steps(STEPS)
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    x = torch.randn(SAMPLES * size, INPUTS, generator=generator)
    y = (x @ torch.randn(INPUTS, CLASSES, generator=generator)).argmax(-1)
    module = build(seed, hidden)
    alone = train(module, module, (x, y), steps)
    shares = list(zip(x.chunk(size), y.chunk(size), strict=True))
    context = f"a network of {sum(p.numel() for p in module.parameters())} parameters, {method.said}, {steps} steps"
    found = attempt.run(probe_training, method.arguments, seed, hidden, steps, per_rank=shares, context=context)
    for rank, result in enumerate(found):
        for name, tensor in result["state"].items():
            if not torch.equal(tensor, found[0]["state"][name]):
                evidence = f"{context}: after training, {name} differs from that on rank 0"
                raise Wrong({rank: evidence}, "Hint: do all ranks get the same gradients, bit for bit?")
    last = sum(result["losses"][-1] for result in found) / size
    most = MARGIN * alone[-1] + SLACK * alone[0]
    if not last <= most:
        raise Wrong(
            f"{context}: the loss falls from {alone[0]:.3f} to {last:.4f}; without compression, it falls to "
            f"{alone[-1]:.4f}, and at most {most:.4f} is accepted",
            hints.ON_TRAINING[type(method)],
        )
