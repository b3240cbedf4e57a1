"""Train with any rung of the ladder, or with torch's own: one loop for all.

    torchrun --nproc_per_node=2 -m solutions.train --strategy overlapped_ddp --model gpt --steps 100
    python -m solutions.train                                    # one process takes the whole batch
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 -m solutions.train
    ranks.run(train, Settings(strategy="bucketed_ddp"))          # in a notebook, on the ranks that run there

Each rank takes its share of the same global batch: the losses are the same with every strategy, on any number of ranks.
"""

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any group: its default arguments would hold ours past the end
from torch import nn

from shared import memory, wire
from shared.data.tasks import TASKS, Task
from shared.wire.clock import Clock
from solutions.strategies import STRATEGIES, Options

# Steps 0 and 1 make what stays: the optimizer's state, and the buckets that DDP arranges anew after its first backward.
LEDGER_STEP, MEMORY_STEP, FIRST_TIMED_STEP = 2, 3, 4
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"strategy": STRATEGIES, "model": TASKS, "optimizer": OPTIMIZERS}


@dataclass(frozen=True)
class Settings:
    """What to train and how; the same on all ranks."""

    strategy: str = "overlapped_ddp"
    model: str = "mlp"
    steps: int = 60
    global_batch: int = 96  # samples per step, over all ranks
    accumulate: int = 1  # micro-batches that each rank cuts its share into
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    bucket_cap_mb: float = 25.0
    seed: int = 0
    bf16: bool = False
    double: bool = False

    @property
    def options(self) -> Options:
        """Return what the strategy is built with."""
        return Options(OPTIMIZERS[self.optimizer], {"lr": self.learning_rate}, self.bucket_cap_mb)

    def check(self, world_size: int) -> None:
        """Raise a ValueError of one sentence for settings that cannot be trained with."""
        for what, there_is in CHOICES.items():
            if (name := getattr(self, what)) not in there_is:
                raise ValueError(f"there is no {what} {name!r}: choose one of {', '.join(there_is)}")
        strategy = STRATEGIES[self.strategy]
        if reason := strategy.why_not():
            raise ValueError(reason)
        if self.accumulate > 1 and "accumulation" not in strategy.supports:
            raise ValueError(f"strategy {self.strategy} takes one micro-batch per step, got {self.accumulate}")
        if self.double and "float64" not in strategy.supports:
            raise ValueError(f"strategy {self.strategy} keeps its weights in fp32: it cannot train in double precision")
        if self.steps <= FIRST_TIMED_STEP:
            raise ValueError(f"steps must be above {FIRST_TIMED_STEP}, the first that is timed, got {self.steps}")
        if min(self.accumulate, self.global_batch) < 1 or self.global_batch % (world_size * self.accumulate):
            among = f"{world_size} ranks of {self.accumulate} equal micro-batches each"
            raise ValueError(f"a global batch of {self.global_batch} cannot be shared among {among}")
        if self.bf16 and self.double:
            raise ValueError("bf16 and double exclude each other")


@dataclass(frozen=True)
class Summary:
    """What came of a training: losses over all ranks, the rest as this rank saw it."""

    strategy: str
    model: str
    parameters: int
    world_size: int
    backend: str
    device: str
    steps: int
    loss_first: float
    loss_last: float
    losses: list[float]
    ms_per_step: float  # median
    messages_per_step: int
    sent_mb_per_step: float  # what a ring must send
    peak_mb: float

    def __str__(self) -> str:
        trained = (
            f"loss {self.loss_first:.3f} → {self.loss_last:.3f} in {self.steps} steps of {self.ms_per_step:.1f} ms"
        )
        sent = f"{self.messages_per_step} messages, {self.sent_mb_per_step:.3g} MB sent, peak {self.peak_mb:.3g} MB"
        return f"{self.strategy}, {self.model} on {self.world_size} × {self.device} ({self.backend}): {trained}, {sent}"


def train(settings: Settings, device: torch.device | str | None = None, task: Task | None = None) -> Summary:
    """Train on the ranks of the current process group; called on each of them.

    device: by default this process's GPU, if it uses one. task: by default the one that settings.model names.
    Raises: ValueError for settings that these ranks cannot train with.
    """
    settings.check(dist.get_world_size())
    device = device or (f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu")
    task = task or TASKS[settings.model](settings.seed, torch.float64 if settings.double else torch.float32)
    parameters = sum(parameter.numel() for parameter in task.module.parameters())
    model, optimizer = STRATEGIES[settings.strategy].build(task.module.to(device), settings.options)

    clock, losses, marks, seen = Clock(), [], [], {}
    watches = {LEDGER_STEP: wire.ledger(), MEMORY_STEP: memory.peak(model, optimizer)}
    for number, micro_batches in enumerate(my_batches(task, settings, device)):
        with watches.get(number, contextlib.nullcontext()) as seen[number]:
            began = clock.mark()
            losses.append(train_step(model, optimizer, micro_batches, settings.bf16))
            marks.append((began, clock.mark()))

    mean_losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean_losses)  # once, at the end: a step sends gradients only
    step_ms = [1e3 * (clock.seconds(ended) - clock.seconds(began)) for began, ended in marks[FIRST_TIMED_STEP:]]
    return Summary(
        strategy=settings.strategy,
        model=settings.model,
        parameters=parameters,
        world_size=dist.get_world_size(),
        backend=dist.get_backend(),
        device=str(device),
        steps=settings.steps,
        loss_first=mean_losses[0].item(),
        loss_last=mean_losses[-1].item(),
        losses=mean_losses.tolist(),
        ms_per_step=statistics.median(step_ms),
        messages_per_step=seen[LEDGER_STEP].messages,
        sent_mb_per_step=seen[LEDGER_STEP].sent_bytes / 1e6,
        peak_mb=seen[MEMORY_STEP].peak_bytes / 1e6,
    )


def my_batches(task: Task, settings: Settings, device: torch.device | str) -> Iterator[list[tuple]]:
    """Yield this rank's share of each step's global batch, as micro-batches of (inputs, targets)."""
    draw = torch.Generator().manual_seed(settings.seed)  # all ranks draw alike, then each takes every N-th
    for _ in range(settings.steps):
        everyones = torch.randint(task.length, (settings.global_batch,), generator=draw)
        mine = everyones[dist.get_rank() :: dist.get_world_size()]
        picked = [task.pick(numbers) for numbers in mine.chunk(settings.accumulate)]
        yield [(inputs.to(device), targets.to(device)) for inputs, targets in picked]


def train_step(model: nn.Module, optimizer, micro_batches: list[tuple], bf16: bool) -> torch.Tensor:
    """Take one optimizer step. → the mean loss of this rank's samples"""

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()) / len(micro_batches)
        loss.backward()  # outside: its operators take their types from forward's
        return loss.detach()

    optimizer.zero_grad()
    *earlier, last = micro_batches
    with getattr(model, "no_sync", contextlib.nullcontext)() if earlier else contextlib.nullcontext():
        losses = [backward(*batch) for batch in earlier]
    losses.append(backward(*last))
    getattr(model, "finish_gradient_sync", lambda: None)()
    optimizer.step()
    return sum(losses)


def main() -> None:
    settings, json_path = parse_arguments()
    summary = train(settings, join())
    if dist.get_rank() == 0:
        as_json = json.dumps(asdict(summary))
        print(as_json if json_path == "-" else summary)
        if json_path not in (None, "-"):
            Path(json_path).write_text(as_json)
    dist.destroy_process_group()  # ends gloo's threads too: one that outlives Python aborts its process


def parse_arguments() -> tuple[Settings, str | None]:
    parser = argparse.ArgumentParser(prog="python -m solutions.train", description=__doc__.splitlines()[0])
    for each in fields(Settings):
        option, choices = "--" + each.name.replace("_", "-"), ", ".join(CHOICES.get(each.name, ()))
        kind = {"action": "store_true"} if each.type is bool else {"type": each.type, "default": each.default}
        parser.add_argument(option, **kind, help=f"{choices} (default: {each.default})")
    parser.add_argument("--json", metavar="PATH", help="write the summary there; - prints it in place of a line")
    options = vars(parser.parse_args())
    json_path, settings = options.pop("json"), Settings(**options)
    try:
        settings.check(int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as refused:
        parser.error(str(refused))
    if json_path and not Path(json_path).parent.is_dir():
        parser.error(f"--json: there is no folder {Path(json_path).parent}")
    return settings, json_path


def join() -> torch.device:
    """Join the group that torchrun prepared, else a group of one. → this rank's own device"""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.device_count() >= local_ranks and dist.is_nccl_available():
        torch.cuda.set_device(local_rank)  # not the rank: on the second host that is past the last GPU
        dist.init_process_group("nccl", **alone)
        return torch.device("cuda", local_rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **alone)
    return torch.device("cpu")


if __name__ == "__main__":
    main()
