"""The part of `traces.py` that runs on a rank: train a small GPT with one strategy, and profile one step."""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shared.models import GPTConfig, TinyGPT
from shared.ranks import nccl, rankside
from shared.wire import instrumentation
from solutions.strategies import STRATEGIES, Options
from tests.gpu import reduction
from tests.gpu.reduction import PREFIX, STEP, Reduced

WARM_UP_STEPS = 3  # before the profile
DISCARDED_STEPS = 2  # in the profile: the first ones that a profiler sees take longer


@dataclass(frozen=True)
class Training:
    """What every strategy trains: a step should take 10 to 40 ms on a large GPU that two ranks share."""

    config: GPTConfig
    micro_batch: int
    dtype: torch.dtype
    bucket_cap_mb: float

    @property
    def description(self) -> str:
        config, dtype = self.config, str(self.dtype).removeprefix("torch.")
        batch = f"{self.micro_batch} sequences of {config.context} tokens per rank"
        return f"GPT with {config.layers} layers of width {config.width} in {dtype}, AdamW, {batch}"


ON_A_GPU = Training(GPTConfig(8192, context=1024, layers=8, heads=8, width=1024), 4, torch.bfloat16, 25.0)
DRY = Training(GPTConfig(vocab_size=256, context=64, layers=4, heads=4, width=128), 2, torch.float32, 0.8)


@dataclass
class Recorded:
    """One profiled step of one rank."""

    reduced: Reduced
    step_ms: float
    facts: dict[str, str]  # what the trace says about the machine


def on_a_rank(name: str, training: Training) -> Recorded:
    """Train with one strategy, and profile one step. Frees the GPU's memory at the end."""
    try:
        return _record(name, training)
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _record(name: str, training: Training) -> Recorded:
    device = torch.device(rankside.here.device)
    with torch.device(device):
        module = TinyGPT(training.config).to(training.dtype)
    draw = torch.Generator().manual_seed(dist.get_rank())
    size = (training.micro_batch, training.config.context)
    tokens = torch.randint(training.config.vocab_size, size, generator=draw).to(device)
    options = Options(defaults={"lr": 1e-4}, bucket_cap_mb=training.bucket_cap_mb)
    model, optimizer = STRATEGIES[name].build(module, options)
    step = _step(model, optimizer, tokens, device)
    for _ in range(WARM_UP_STEPS):
        step()
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = Path(folder) / "profile.json"
        calls, took_s = _profile(step, device, path)
        profiled = json.loads(path.read_text())
    called = [(call.op, call.payload_bytes) for call in calls]
    return Recorded(reduction.reduce(profiled, called), 1e3 * took_s, facts_of(device))


def _step(model, optimizer, tokens: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one training step, with a range in the profile for each of its phases."""
    finish = getattr(model, "finish_gradient_sync", None)

    def step() -> None:
        with record_function(f"{PREFIX}zero_grad"):
            optimizer.zero_grad()
        with record_function(f"{PREFIX}forward"):
            loss = model(tokens, tokens)
        with record_function(f"{PREFIX}backward"):
            loss.backward()
        if finish is not None:
            with record_function(f"{PREFIX}finish_gradient_sync"):
                finish()
        with record_function(f"{PREFIX}optimizer.step"):
            optimizer.step()
        if device.type == "cuda":
            with record_function(f"{PREFIX}wait for the GPU"):
                torch.cuda.synchronize(device)

    return step


def _profile(step: Callable[[], None], device: torch.device, path: Path) -> tuple[list, float]:
    """Write the profile of one step to a file. Returns the calls that it launched, and its time."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    plan = schedule(wait=0, warmup=DISCARDED_STEPS, active=1, repeat=1)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=lambda done: done.export_chrome_trace(str(path))
    ) as profiler:
        for _ in range(DISCARDED_STEPS + 1):
            _meet(device)
            began_s = time.perf_counter()
            with instrumentation.listening() as calls, record_function(STEP):
                step()
            took_s = time.perf_counter() - began_s
            profiler.step()
    return calls, took_s


def _meet(device: torch.device) -> None:
    """Let all ranks begin the step at the same time, with nothing left to do on their GPUs."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts_of(device: torch.device) -> dict[str, str]:
    """Return what a reader of a trace must know about the machine."""
    facts = {"torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "CUDA": torch.version.cuda or ""}
        facts |= {"NCCL": nccl.named(nccl.version_for_ranks())}
    else:
        facts |= {"device": f"CPU with {os.cpu_count()} cores"}
    return facts
