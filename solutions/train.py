"""Train with any strategy of the registry: the course's own, torch's or DeepSpeed's.

    torchrun --nproc_per_node=2 -m solutions.train --strategy overlapped_ddp --model gpt --steps 100
    torchrun --nproc_per_node=8 -m solutions.train --model gpt --strategy 3d --dp 2 --pp 2 --tp 2 --zero-stage 1
    torchrun --nproc_per_node=4 -m solutions.train --model rotary-gpt --strategy cp --dp 2 --cp 2
    torchrun --nproc_per_node=2 -m solutions.train --model moe --strategy ep
    torchrun --nproc_per_node=2 -m solutions.train --compress int8
    python -m solutions.train                                    # one process trains on the full batch
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 -m solutions.train
    ranks.run(train, Settings(strategy="bucketed_ddp"))          # in a notebook, on its running ranks

Each rank trains on an equal share of the same global batch, so the losses do not depend on the strategy or on the
number of ranks.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its default arguments would keep the group alive until exit
from torch import nn

from shared import memory, wire
from shared.data.tasks import Task
from shared.wire.clock import Clock
from solutions.process_group import UnequalHosts, join_process_group
from solutions.strategies import STRATEGIES
from solutions.training_settings import CHOICES, FIRST_TIMED_STEP, LEDGER_STEP, MEMORY_STEP, TASKS, Settings


@dataclass(frozen=True)
class Summary:
    """The result of a training run: losses are means over all ranks, everything else was measured on this rank."""

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
    sent_mb_per_step: float  # assuming ring collectives
    peak_mb: float

    def __str__(self) -> str:
        run = f"{self.strategy}, {self.model} on {self.world_size} × {self.device} ({self.backend})"
        loss = f"loss {self.loss_first:.3f} → {self.loss_last:.3f} in {self.steps} steps of {self.ms_per_step:.1f} ms"
        sent = f"{self.messages_per_step} messages and {self.sent_mb_per_step:.3g} MB sent per step"
        return f"{run}: {loss}, {sent}, peak memory {self.peak_mb:.3g} MB"


def train(settings: Settings, device: torch.device | str | None = None, task: Task | None = None) -> Summary:
    """Train on the ranks of the current process group. To be called on each of them.

    Args:
        settings: What to train and how.
        device: This rank's device. By default its current GPU if the process uses one, else the CPU.
        task: The model and its data. By default the task called settings.model.

    Raises:
        ValueError: If these ranks cannot train with the settings.
    """
    settings.check(dist.get_world_size())
    device = device or (f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu")
    task = task or TASKS[settings.model](settings.seed, torch.float64 if settings.double else torch.float32)
    parameters = sum(parameter.numel() for parameter in task.module.parameters())
    strategy = STRATEGIES[settings.strategy]
    model, optimizer = strategy.build(task.module.to(device), settings.options)
    loss_of = loss_by_the_model if strategy.splits_layers else loss_of_logits
    take_step = functools.partial(train_step, bf16=settings.bf16, loss_of=loss_of)
    if strategy.is_pipelined:
        take_step = pipeline_step

    clock, losses, marks, measured = Clock(), [], [], {}
    instruments = {LEDGER_STEP: wire.ledger(), MEMORY_STEP: memory.peak(model, optimizer)}
    for step, micro_batches in enumerate(rank_batches(task, settings, device)):
        with instruments.get(step, contextlib.nullcontext()) as measured[step]:
            began = clock.mark()
            losses.append(take_step(model, optimizer, micro_batches))
            marks.append((began, clock.mark()))

    mean_losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean_losses)  # only once, at the end, so that the steps send nothing but gradients
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
        messages_per_step=measured[LEDGER_STEP].messages,
        sent_mb_per_step=measured[LEDGER_STEP].sent_bytes / 1e6,
        peak_mb=measured[MEMORY_STEP].peak_bytes / 1e6,
    )


def rank_batches(task: Task, settings: Settings, device: torch.device | str) -> Iterator[list[tuple]]:
    """Yield this rank's share of each step's global batch, as micro-batches of (inputs, targets).

    Ranks that split a model's layers do not share the batch: each gets all of it. So do those that share sequences,
    which get all of their replica's part.
    """
    generator = torch.Generator().manual_seed(settings.seed)  # so that all ranks draw the same global batches
    for _ in range(settings.steps):
        global_indices = torch.randint(task.length, (settings.global_batch,), generator=generator)
        if STRATEGIES[settings.strategy].splits_layers:
            replica = dist.get_rank() * settings.shares_of_batch // dist.get_world_size()
            rank_indices = global_indices[replica :: settings.shares_of_batch]
        else:
            rank_indices = global_indices[dist.get_rank() :: dist.get_world_size()]
        micro_batches = [task.pick(indices) for indices in rank_indices.chunk(settings.accumulate)]
        yield [(inputs.to(device), targets.to(device)) for inputs, targets in micro_batches]


def loss_of_logits(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss from the model's logits."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def loss_by_the_model(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Let a model whose logits are split over the ranks compute the mean loss."""
    return model(inputs, targets)


def train_step(
    model: nn.Module, optimizer, micro_batches: list[tuple], bf16: bool, loss_of=loss_of_logits
) -> torch.Tensor:
    """Take one optimizer step. Returns the mean loss of this rank's samples."""

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(model, inputs, targets) / len(micro_batches)
        loss.backward()  # outside of autocast: backward uses the dtypes that autocast chose in forward
        return loss.detach()

    optimizer.zero_grad()
    *earlier, last = micro_batches
    with getattr(model, "no_sync", contextlib.nullcontext)() if earlier else contextlib.nullcontext():
        losses = [backward(*micro_batch) for micro_batch in earlier]
    losses.append(backward(*last))
    getattr(model, "finish_gradient_sync", lambda: None)()
    optimizer.step()
    return sum(losses)


def pipeline_step(model: nn.Module, optimizer, batches: list[tuple]) -> torch.Tensor:
    """Take one optimizer step with a model that runs forward and backward itself. Returns the mean loss."""
    optimizer.zero_grad()
    ((inputs, targets),) = batches
    loss = model.step(inputs, targets)
    optimizer.step()
    return loss


def main() -> None:
    settings, json_path = parse_arguments()
    try:
        device = join_process_group()
    except UnequalHosts as error:
        sys.exit(f"python -m solutions.train: error: {error}")
    try:
        summary = train(settings, device)
    except ValueError as error:  # such as more stages than layers
        sys.exit(f"python -m solutions.train: error: {error}")
    if dist.get_rank() == 0:
        as_json = json.dumps(asdict(summary))
        print(as_json if json_path == "-" else summary)
        if json_path not in (None, "-"):
            Path(json_path).write_text(as_json, encoding="utf-8")
    dist.destroy_process_group()


def parse_arguments() -> tuple[Settings, str | None]:
    """Parse the command line. Returns the settings and the path for the JSON summary."""
    parser = argparse.ArgumentParser(prog="python -m solutions.train", description=(__doc__ or "").split("\n")[0])
    for setting in fields(Settings):
        flag, choices = "--" + setting.name.replace("_", "-"), ", ".join(CHOICES.get(setting.name, ()))
        is_switch = setting.type is bool
        kind = {"action": "store_true"} if is_switch else {"type": setting.type, "default": setting.default}
        parser.add_argument(flag, **kind, help=f"{choices} (default: {setting.default})")
    json_help = "write the summary to this file as JSON; with -, print it as JSON instead of as a line of text"
    parser.add_argument("--json", metavar="PATH", help=json_help)
    options = vars(parser.parse_args())
    json_path, settings = options.pop("json"), Settings(**options)
    try:
        settings.check(int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        parser.error(str(error))
    if json_path and not Path(json_path).parent.is_dir():
        parser.error(f"--json: there is no folder {Path(json_path).parent}")
    return settings, json_path


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 keeps its group until the end, and Python's usual exit can abort on gloo's running threads
