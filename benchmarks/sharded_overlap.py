"""Compare ZeRO-1 and ZeRO-2 with OverlappedDDP behind a link, on ranks that sleep instead of computing.

    python -m benchmarks.sharded_overlap                        # 2 and 4 ranks, behind 1 Gbit/s and over loopback
    python -m benchmarks.sharded_overlap --rounds 40 --ranks 4 --links 1gbit --json sharded_overlap.json

A model of six blocks sleeps for 12 ms in each block's forward and for 24 ms in its backward, and has 28 MB of
gradients. So the cores are free for communication, as if a GPU computed, and the machine's noise is small. In each
round, every version takes a few steps, in a shuffled order that is the same on all ranks, and these last until the
slowest rank is done. Ratios are computed within each round.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import report
from shared import ranks
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2

BLOCKS, GRADIENTS_MB, FORWARD_S, BACKWARD_S = 6, 28, 0.012, 0.024
CAP_MB = 5.0  # a bucket per block, for the versions that let us choose
DDP, ZERO1, ZERO1_MODULE, ZERO2 = "OverlappedDDP", "ZeRO1", "ZeRO1, with module", "ZeRO2"
# The most time that a version may take, as a multiple of OverlappedDDP's, by what limits a step.
AIMS = {"1gbit": {ZERO1_MODULE: 0.95, ZERO2: 1.00}, "loopback": {ZERO1_MODULE: 1.02, ZERO2: 1.02}}
WARM_UP_ROUNDS = 2


class Sleep(torch.autograd.Function):
    """A layer that sleeps, and whose gradient is the same for all elements of its weight."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        outputs = inputs + weight[0]
        time.sleep(FORWARD_S)
        return outputs

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_S)
        (weight,) = ctx.saved_tensors
        return gradient, torch.full_like(weight, 1e-3)


class Block(nn.Module):
    def __init__(self, numel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, inputs: Tensor) -> Tensor:
        return Sleep.apply(inputs, self.weight)


def new_model() -> nn.Module:
    return nn.Sequential(*(Block(int(GRADIENTS_MB * 1e6 / 4 / BLOCKS)) for _ in range(BLOCKS)))


def versions() -> dict[str, tuple[nn.Module, object]]:
    """Build a model and its optimizer for each version. All of them use SGD, which takes little time."""
    settings, built = {"lr": 0.1}, {}
    ddp, alone, with_module = OverlappedDDP(new_model(), CAP_MB), new_model(), new_model()
    built[DDP] = ddp, torch.optim.SGD(ddp.parameters(), **settings)
    built[ZERO1] = alone, ZeRO1(alone.parameters(), torch.optim.SGD, **settings)
    built[ZERO1_MODULE] = with_module, ZeRO1(with_module.parameters(), torch.optim.SGD, module=with_module, **settings)
    zero2 = ZeRO2(new_model(), torch.optim.SGD, CAP_MB, **settings)
    built[ZERO2] = zero2, zero2
    return built


def step_of(model: nn.Module, optimizer) -> Callable[[], None]:
    finish, inputs = getattr(model, "finish_gradient_sync", lambda: None), torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        finish()
        optimizer.step()

    return step


def on_a_rank(rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure every version, in each round for a few steps in a row. Returns the ms per step."""
    torch.set_num_threads(1)
    runs = {name: (step_of(*built), built[1]) for name, built in versions().items()}
    times_ms: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(round_index).sample(list(runs), len(runs)):
            step, optimizer = runs[name]
            dist.barrier()
            step()  # The next forward is already one whose all-gathers are in flight.
            began_s = time.perf_counter()
            for _ in range(steps):
                step()
            times_ms[name].append(1e3 * (time.perf_counter() - began_s) / steps)
            getattr(getattr(optimizer, "optimizer", optimizer), "finish_parameter_sync", lambda: None)()
    return {name: times[WARM_UP_ROUNDS:] for name, times in times_ms.items()}


def measure(world_size: int, link: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the time of each version in each round, of the slowest rank."""
    from benchmarks.sharded_overlap import on_a_rank  # __main__'s would be sent to the ranks without this file's names

    with report.started(world_size, link=None if link == "loopback" else link):
        per_rank = ranks.run(on_a_rank, rounds, steps, timeout_s=1800.0)
    return {
        name: [max(times) for times in zip(*(each[name] for each in per_rank), strict=True)] for name in per_rank[0]
    }


def rows(world_size: int, link: str, times_ms: dict[str, list[float]]) -> list[report.Row]:
    """Compare each version with OverlappedDDP, round by round."""
    aims = AIMS["loopback" if link == "loopback" else "1gbit"]
    return [
        report.Row(
            f"{world_size} ranks, {link}: time, {name} / {DDP}",
            "×",
            [mine / other for mine, other in zip(times_ms[name], times_ms[DDP], strict=True)],
            aims.get(name, float("inf")),
        )
        for name in times_ms
        if name != DDP
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare ZeRO-1 and ZeRO-2 with OverlappedDDP behind a link.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="steps in a row, in each round (default: 4)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["1gbit", "loopback"])
    parser.add_argument("--json", metavar="FILE", help="write all measurements to this file")
    options = parser.parse_args()
    measured = {}
    for link in options.links:
        for world_size in options.ranks:
            times_ms = measured[f"{world_size} ranks, {link}"] = measure(
                world_size, link, options.rounds, options.steps
            )
            print(
                f"{world_size} ranks, {link}:", {name: f"{statistics.median(t):.0f} ms" for name, t in times_ms.items()}
            )
            for row in rows(world_size, link, times_ms):
                low, middle, high = statistics.quantiles(row.values, n=4, method="inclusive")
                print(f"  {row.what}: {middle:.3f} ({low:.3f}–{high:.3f}), aim {row.target}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(measured, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
