"""Measure the rungs that average gradients beside torch's DistributedDataParallel: time, messages, memory.

    python -m benchmarks.ladder                            # tables
    python -m benchmarks.ladder --json ladder.json --figure ladder.png
    python -m benchmarks.ladder --quick                    # few rounds: whether it runs, not how fast

In a round each strategy takes one step, in an order that all ranks shuffle alike; a step lasts until its slowest rank
is done. A ratio is the median of the rounds' own ratios, so that a busy moment of the machine meets both sides of it.
*Exposed* is what a step takes longer than that of the module alone, which sends nothing: messages that nothing hides,
and the strategy's own work.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from shared import hosts, memory, ranks, rankside, wire
from shared.models import GPTConfig, TinyGPT
from solutions.bucketed_ddp import BucketedDDP
from solutions.manual_ddp import ManualDDP, broadcast_state
from solutions.overlapped_ddp import OverlappedDDP

WORLD_SIZES = (2, 4)
LINKS = (None, "1gbit")  # None: the ranks share this machine's loopback
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS = 30, 3, 3  # to warm up: DDP arranges its buckets anew after its first step
TIMEOUT_S = 1800.0
MB = 1e6
ALONE, TORCHS, FLAT = "module alone", "DDP, bucket view", "flat"
OVERLAPPED_AIM, BUCKETED_AIM = 1.0, 1.1
MEMORY_AIM = 1.001  # a bucket keeps its divisor, four bytes
# Buckets filled after backward stand beside all its gradients, as DDP's own do unless they are the gradients' memory.
MEMORY_LIKE = {"BucketedDDP": "DDP", "OverlappedDDP": TORCHS}


class FlatDDP(nn.Module):
    """The obvious way to spare messages: copy all gradients into one tensor after backward, and send that."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        broadcast_state(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self) -> None:
        parameters = list(self.module.parameters())
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


STRATEGIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    ALONE: lambda module: module,
    "DDP": DistributedDataParallel,
    TORCHS: lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    FLAT: FlatDDP,
    "ManualDDP": ManualDDP,
    "BucketedDDP": BucketedDDP,
    "OverlappedDDP": OverlappedDDP,
}


class ManySmall(nn.Module):
    """100 layers of 64×64: little to compute and little to send, so that what each parameter costs stands out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)  # added: 100 layers in a row would fade to denormal numbers, which are slow
        return x.square().mean()


def _gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = GPTConfig(vocab_size=256, context=64, layers=6, heads=6, width=384)
    tokens = torch.randint(config.vocab_size, (2, config.context))
    return TinyGPT(config), (tokens, tokens)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {  # module → loss, and its inputs
    "TinyGPT": _gpt,
    "many small": lambda: (ManySmall(), (torch.randn(32, 64),)),
}


# -- on a rank


@dataclass(frozen=True)
class Found:
    """What one rank found out about one strategy."""

    times_ms: list[float]
    messages: int
    sent_mb: float
    peak_mb: float


def on_a_rank(model_name: str, rounds: int) -> dict[str, Found]:
    """Measure every strategy on one model; runs on every rank."""
    device = torch.device(rankside.here.device)
    steps, trained = {}, {}
    for name, wrap in STRATEGIES.items():
        module, inputs = MODELS[model_name]()
        model = wrap(module.to(device))
        trained[name] = model, torch.optim.SGD(module.parameters(), lr=1e-4)
        steps[name] = _step_of(*trained[name], [tensor.to(device) for tensor in inputs])
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(number).sample(list(steps), len(steps)):
            dist.barrier()
            began_s = time.perf_counter()
            steps[name]()
            times_ms[name].append(1e3 * (time.perf_counter() - began_s))
    found = {}
    for name, step in steps.items():
        with wire.ledger() as log:
            step()
        with memory.peak(*trained[name]) as peak:
            step()
        sent_mb, peak_mb = log.sent_bytes / MB, peak.peak_bytes / MB
        found[name] = Found(times_ms[name][WARM_UP_ROUNDS:], log.messages, sent_mb, peak_mb)
    return found


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> Callable[[], None]:
    finish = getattr(model, "finish_gradient_sync", lambda: None)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        finish()
        optimizer.step()
        loss.item()  # on a GPU it is this line that waits

    return step


# -- what came of it


@dataclass(frozen=True)
class Setting:
    """One model on some ranks with one kind of link between them."""

    model: str
    link: str
    ranks: int
    found: dict[str, Found]  # by strategy: each round's slowest rank; of the rest, the rank with most

    def ratios(self, strategy: str, over: str = TORCHS) -> list[float]:
        return [mine / other for mine, other in self._rounds(strategy, over)]

    def exposed_ms(self, strategy: str) -> float:
        return statistics.median(mine - alone for mine, alone in self._rounds(strategy, ALONE))

    def median_ms(self, strategy: str) -> float:
        return statistics.median(self.found[strategy].times_ms)

    def _rounds(self, strategy: str, other: str) -> Iterator[tuple[float, float]]:
        return zip(self.found[strategy].times_ms, self.found[other].times_ms, strict=True)

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.link}"


def merged(of_ranks: list[dict[str, Found]]) -> dict[str, Found]:
    """Let each round last until its slowest rank is done."""
    merged = {}
    for name in of_ranks[0]:
        same = [found[name] for found in of_ranks]
        times_ms = [max(times) for times in zip(*(each.times_ms for each in same), strict=True)]
        most = [max(getattr(each, what) for each in same) for what in ("messages", "sent_mb", "peak_mb")]
        merged[name] = Found(times_ms, *most)
    return merged


def measure(rounds: int, links: tuple[str | None, ...]) -> list[Setting]:
    from benchmarks.ladder import on_a_rank  # as __main__'s, it would travel without this file's names

    settings = []
    for link in links:
        for world_size in WORLD_SIZES:
            with contextlib.redirect_stdout(io.StringIO()):
                ranks.start(world_size, detect_mismatch=False, link=link)
            try:
                for model in MODELS:
                    of_ranks = ranks.run(on_a_rank, model, rounds, timeout_s=TIMEOUT_S)
                    settings.append(Setting(model, link or "loopback", world_size, merged(of_ranks)))
                    print(f"measured: {settings[-1]}", file=sys.stderr)
            finally:
                ranks.stop()
    return sorted(settings, key=lambda setting: list(MODELS).index(setting.model))


def aims(settings: list[Setting]) -> list[report.Row]:
    """Hold the rungs against torch's DDP, and against one flat message."""
    rows = []
    for setting in settings:
        overlapped, bucketed = setting.ratios("OverlappedDDP"), setting.ratios("BucketedDDP", over=FLAT)
        rows.append(report.Row(f"{setting}: OverlappedDDP / {TORCHS}", "×", overlapped, OVERLAPPED_AIM))
        rows.append(report.Row(f"{setting}: BucketedDDP / flat", "×", bucketed, BUCKETED_AIM))
        for name, like in MEMORY_LIKE.items():
            peaks = setting.found[name].peak_mb / setting.found[like].peak_mb
            rows.append(report.Row(f"{setting}: peak memory, {name} / {like}", "×", [peaks], MEMORY_AIM))
    return rows


def as_table(settings: list[Setting]) -> str:
    lines = [["", "", "", "", "ms", "ratio", "quartiles", "messages", "MB sent", "exposed ms", "peak MB"]]
    for setting in settings:
        for name, found in setting.found.items():
            low, middle, high = statistics.quantiles(setting.ratios(name), n=4, method="inclusive")
            ratio = ["", ""] if name == ALONE else [f"{middle:.2f}", f"{low:.2f}–{high:.2f}"]
            exposed = "" if name == ALONE else f"{setting.exposed_ms(name):.1f}"
            numbers = [str(found.messages), f"{found.sent_mb:.2f}", exposed, f"{found.peak_mb:.1f}"]
            words = [setting.model, setting.link, str(setting.ranks), name]
            lines.append([*words, f"{setting.median_ms(name):.1f}", *ratio, *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = [str.ljust] * 4 + [str.rjust] * 7
    return "\n".join(
        "  ".join(fit(cell, width) for fit, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_json(found_on: dict, settings: list[Setting]) -> str:
    rows = [asdict(row) | {"median": row.median, "met": row.met} for row in aims(settings)]
    return json.dumps({"machine": found_on, "settings": [asdict(each) for each in settings], "aims": rows}, indent=1)


def figure(settings: list[Setting]):
    """Draw each setting's steps, split into what the module alone takes and what is exposed."""
    import matplotlib.pyplot as plt

    from shared.plots import COLOURS, HATCHES

    across = len({(setting.link, setting.ranks) for setting in settings})
    down = len(settings) // across
    size = {"figsize": (1.2 + 2.6 * across, 0.8 + 2.3 * down)}
    drawing, panels = plt.subplots(down, across, **size, sharey=True, layout="constrained", squeeze=False)
    for setting, axes in zip(settings, panels.flat, strict=True):
        names = [name for name in STRATEGIES if name != ALONE]
        compute_ms = [setting.median_ms(ALONE)] * len(names)
        exposed_ms = [max(0.0, setting.exposed_ms(name)) for name in names]
        edge = {"edgecolor": "black", "linewidth": 0.6}
        axes.barh(names, compute_ms, facecolor=COLOURS[0], label="the module alone", **edge)
        drawn = axes.barh(
            names, exposed_ms, left=compute_ms, facecolor=COLOURS[4], hatch=HATCHES[1], label="exposed", **edge
        )
        axes.bar_label(drawn, [f"{setting.median_ms(name):.0f}" for name in names], padding=3, size=8)
        longest_ms = compute_ms[0] + max(exposed_ms)
        axes.set(title=f"{setting.model}\n{setting.ranks} ranks, {setting.link}", xlim=(0, 1.2 * longest_ms))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].invert_yaxis()
    for axes in panels[-1]:
        axes.set_xlabel("ms per step")
    drawing.legend(*panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside upper left")
    plt.close(drawing)
    return drawing


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the rungs beside torch's DistributedDataParallel.")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument("--figure", metavar="FILE.png", help="draw it there")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds per setting ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds per setting")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    found_on, no_link = report.machine(), hosts.why_not()
    if no_link:
        print(f"Without a shaped link: {no_link}", file=sys.stderr)
    settings = measure(QUICK_ROUNDS if options.quick else options.rounds, LINKS[:1] if no_link else LINKS)
    print("  ".join(f"{name} {value}" for name, value in found_on.items()))
    print(as_table(settings), report.as_table(aims(settings)), sep="\n\n")
    if options.json:
        with open(options.json, "w") as file:
            file.write(as_json(found_on, settings))
    if options.figure:
        figure(settings).savefig(options.figure, dpi=150)
    return 0 if all(row.met for row in aims(settings)) else 1


if __name__ == "__main__":
    sys.exit(main())
