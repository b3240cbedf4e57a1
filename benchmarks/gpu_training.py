"""The part of `gpu.py` that runs on a rank: train one GPT with one strategy, with nothing else on the GPU."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.rungs import ON_A_GPU
from shared import memory
from shared.models import GPTConfig, TinyGPT
from shared.ranks import rankside
from shared.wire import clock

ROUNDS, WARM_UP_ROUNDS = 10, 3


@dataclass(frozen=True)
class Training:
    """The training that every strategy does."""

    config: GPTConfig
    micro_batch: int
    rounds: int = ROUNDS


DRY = Training(GPTConfig(vocab_size=64, context=16, layers=2, heads=2, width=32), micro_batch=2, rounds=2)


@dataclass(frozen=True)
class Measurement:
    """The measurements of one strategy on one rank."""

    times_s: list[float]
    losses: list[float]
    held_bytes: int  # in storages, between backward and step
    peak_bytes: int  # according to the allocator: each strategy runs alone, so a GPU must have this much


def parameters_of(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TinyGPT(config).parameters())


def on_a_rank(name: str, training: Training) -> Measurement:
    """Train with one strategy, then free the GPU's memory."""
    try:
        return _train(name, training)
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _train(name: str, training: Training) -> Measurement:
    device = torch.device(rankside.here.device)
    with torch.device(device):
        module = TinyGPT(training.config).bfloat16()
    draw = torch.Generator().manual_seed(dist.get_rank())
    size = (training.micro_batch, training.config.context)
    tokens = torch.randint(training.config.vocab_size, size, generator=draw).to(device)
    model, optimizer = ON_A_GPU[name](module)
    finish: Callable[[], None] = getattr(model, "finish_gradient_sync", lambda: None)

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, tokens)
        loss.backward()
        finish()
        return loss.detach()

    watch, losses, marks = clock.Clock(), [], []
    for _ in range(WARM_UP_ROUNDS + training.rounds):
        dist.barrier()
        began = watch.mark()
        losses.append(backward())
        optimizer.step()
        marks.append((began, watch.mark()))
    times_s = [watch.seconds(ended) - watch.seconds(began) for began, ended in marks]
    with memory.peak(model, optimizer) as peak:
        backward()
        held_bytes = memory.held(model, optimizer).total_bytes
        optimizer.step()
    peak_bytes = peak.allocator_bytes or peak.peak_bytes
    return Measurement(times_s[WARM_UP_ROUNDS:], [loss.item() for loss in losses], held_bytes, peak_bytes)
