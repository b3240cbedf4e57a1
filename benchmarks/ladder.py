"""Measure every rung beside torch's own: time, messages, bytes, memory. What is compared is in `rungs.py`.

    python -m benchmarks.ladder                            # tables
    python -m benchmarks.ladder --rungs sharding           # ZeRO-1, -2 and -3 beside torch's
    python -m benchmarks.ladder --json ladder.json --figure ladder.png
    python -m benchmarks.ladder --readme                   # put the tables anew into README.md
    python -m benchmarks.ladder --quick                    # few rounds: whether it runs, not how fast

In a round each strategy takes one step, in an order that all ranks shuffle alike; a step lasts until its slowest rank
is done. A ratio is the median of the rounds' own ratios, so that a busy moment of the machine meets both sides of it.
*Exposed* is what a step takes longer than that of the module alone, which sends nothing: messages that nothing hides,
and the strategy's own work.
"""

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import report
from benchmarks.rungs import ALONE, DDP_VIEW, MODELS, RUNGS, Aim
from shared import deepspeed_engine, hosts, memory, ranks, wire
from shared.ranks import rankside

WORLD_SIZES = (2, 4)
LINKS = (None, "1gbit")  # None: the ranks share this machine's loopback
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS = 30, 3, 3  # to warm up: DDP arranges its buckets anew after its first step
TIMEOUT_S = 1800.0
MB = 1e6
README = Path(__file__).with_name("README.md")


# -- on a rank


@dataclass(frozen=True)
class Found:
    """What one rank found out about one strategy."""

    times_ms: list[float]
    messages: int
    sent_mb: float
    carried_mb: float  # by the network interface: for all ranks on one machine, for this rank where it is a host
    peak_mb: float


def on_a_rank(rungs: str, model_name: str, rounds: int) -> dict[str, Found]:
    """Measure every strategy on one model; runs on every rank."""
    device = torch.device(rankside.here.device)
    steps, trained = {}, {}
    for name, build in RUNGS[rungs].builds.items():
        module, inputs = MODELS[model_name]()
        trained[name] = build(module.to(device))
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
        dist.barrier()
        with wire.ledger() as log:
            step()
            dist.barrier()
        with memory.peak(*trained[name]) as peak:
            step()
        sent_mb, carried_mb = log.sent_bytes / MB, (log.carried_bytes or 0) / MB
        messages = log.messages - 1  # the barrier was one
        found[name] = Found(times_ms[name][WARM_UP_ROUNDS:], messages, sent_mb, carried_mb, peak.peak_bytes / MB)
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

    rungs: str
    model: str
    link: str
    ranks: int
    found: dict[str, Found]  # by strategy: each round's slowest rank; of the rest, the rank with most

    def ratios(self, strategy: str, over: str = DDP_VIEW) -> list[float]:
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
        most = [max(getattr(each, what) for each in same) for what in ("messages", "sent_mb", "carried_mb", "peak_mb")]
        merged[name] = Found(times_ms, *most)
    return merged


def measure(rungs: list[str], rounds: int, links: tuple[str | None, ...]) -> list[Setting]:
    from benchmarks.ladder import on_a_rank  # as __main__'s, it would travel without this file's names

    settings = []
    for link in links:
        for world_size in WORLD_SIZES:
            with contextlib.redirect_stdout(io.StringIO()):
                ranks.start(world_size, detect_mismatch=False, link=link)
            try:
                for kind, model in itertools.product(rungs, MODELS):
                    of_ranks = ranks.run(on_a_rank, kind, model, rounds, timeout_s=TIMEOUT_S)
                    settings.append(Setting(kind, model, link or "loopback", world_size, merged(of_ranks)))
                    print(f"measured: {settings[-1]}, {kind}", file=sys.stderr)
            finally:
                ranks.stop()
    return sorted(settings, key=lambda each: (rungs.index(each.rungs), list(MODELS).index(each.model)))


def aims(settings: list[Setting]) -> list[report.Row]:
    """Hold the rungs against torch's own, and against one flat message."""
    rows = []
    for setting in settings:
        rungs = RUNGS[setting.rungs]
        for aim in rungs.times:
            rows.append(_row(setting, "", aim, setting.ratios(aim.mine, aim.other)))
        for what, aimed in (("peak_mb", rungs.peaks), ("carried_mb", rungs.carried)):
            for aim in aimed:
                mine, other = (getattr(setting.found[name], what) for name in (aim.mine, aim.other))
                if other:  # not every system tells what its interfaces carried
                    rows.append(_row(setting, f"{what.removesuffix('_mb')}, ", aim, [mine / other]))
    return rows


def _row(setting: Setting, what: str, aim: Aim, values: list[float]) -> report.Row:
    return report.Row(f"{setting}: {what}{aim.mine} / {aim.other}", "×", values, aim.most)


HEADER = ["", "link", "ranks", "strategy", "ms", "ratio", "quartiles", "messages", "MB sent", "carried", "exposed ms"]
HEADER += ["peak MB"]
WORDS = 4  # of the columns are words, the rest numbers


def as_rows(settings: list[Setting]) -> list[list[str]]:
    """A row per setting and strategy, under HEADER."""
    rows = []
    for setting in settings:
        for name, found in setting.found.items():
            low, middle, high = statistics.quantiles(setting.ratios(name), n=4, method="inclusive")
            ratio = ["", ""] if name == ALONE else [f"{middle:.2f}", f"{low:.2f}–{high:.2f}"]
            exposed = "" if name == ALONE else f"{setting.exposed_ms(name):.1f}"
            sent = [f"{found.sent_mb:.2f}", f"{found.carried_mb:.1f}"]
            numbers = [str(found.messages), *sent, exposed, f"{found.peak_mb:.1f}"]
            words = [setting.model, setting.link, str(setting.ranks), name]
            rows.append([*words, f"{setting.median_ms(name):.1f}", *ratio, *numbers])
    return rows


def as_table(settings: list[Setting]) -> str:
    lines = [HEADER, *as_rows(settings)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = [str.ljust] * WORDS + [str.rjust] * (len(HEADER) - WORDS)
    return "\n".join(
        "  ".join(fit(cell, width) for fit, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_markdown(found_on: dict, settings: list[Setting], rounds: int) -> str:
    """The machine, the aims with a column per setting, missed ones bold, and all that was found."""
    machine = ", ".join(f"{name} {value}" for name, value in found_on.items())
    columns = [f"{each.model}, {each.ranks}" + (f", {each.link}" if each.link in LINKS else "") for each in settings]
    lines = [f"One run of {rounds} rounds: {machine}.", "", _line(["aim for time", *columns])]
    lines.append("|" + "---|" * (1 + len(settings)))
    for aim in RUNGS[settings[0].rungs].times:
        rows = [_row(setting, "", aim, setting.ratios(aim.mine, aim.other)) for setting in settings]
        said = [f"{row.median:.2f}" if row.met else f"**{row.median:.2f}**" for row in rows]
        lines.append(_line([f"{aim.mine} / {aim.other} ≤ {aim.most:g}", *said]))
    return "\n".join([*lines, "", _line(HEADER), "|" + "---|" * len(HEADER), *map(_line, as_rows(settings))])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_json(found_on: dict, settings: list[Setting]) -> str:
    rows = [asdict(row) | {"median": row.median, "met": row.met} for row in aims(settings)]
    return json.dumps({"machine": found_on, "settings": [asdict(each) for each in settings], "aims": rows}, indent=1)


def figure(settings: list[Setting]):
    """Draw each setting's steps, split into what the module alone takes and what is exposed."""
    import matplotlib.pyplot as plt

    from shared.plots import COLORS, HATCHES

    across = len({(setting.link, setting.ranks) for setting in settings})
    down = len(settings) // across
    size = {"figsize": (1.2 + 2.6 * across, 0.8 + 2.3 * down)}
    drawing, panels = plt.subplots(down, across, **size, sharey=True, layout="constrained", squeeze=False)
    for setting, axes in zip(settings, panels.flat, strict=True):
        names = [name for name in RUNGS[setting.rungs].builds if name != ALONE]
        compute_ms = [setting.median_ms(ALONE)] * len(names)
        exposed_ms = [max(0.0, setting.exposed_ms(name)) for name in names]
        edge = {"edgecolor": "black", "linewidth": 0.6}
        axes.barh(names, compute_ms, facecolor=COLORS[0], label="the module alone", **edge)
        drawn = axes.barh(
            names, exposed_ms, left=compute_ms, facecolor=COLORS[4], hatch=HATCHES[1], label="exposed", **edge
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
    parser = argparse.ArgumentParser(description="Measure the rungs beside torch's own.")
    parser.add_argument("--rungs", choices=RUNGS, help="default: all")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument("--figure", metavar="FILE.png", help="draw it there, in a file for each kind of rungs")
    parser.add_argument("--readme", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds per setting ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds per setting")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    found_on, no_link = report.machine(), hosts.why_not()
    if not deepspeed_engine.why_not():
        found_on["deepspeed"] = importlib.metadata.version("deepspeed")
    if no_deepspeed := deepspeed_engine.why_not():
        print(f"Without DeepSpeed: {no_deepspeed}", file=sys.stderr)
    if no_link:
        print(f"Without a shaped link: {no_link}", file=sys.stderr)
    rungs = [options.rungs] if options.rungs else list(RUNGS)
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    settings = measure(rungs, rounds, LINKS[:1] if no_link else LINKS)
    print("  ".join(f"{name} {value}" for name, value in found_on.items()))
    print(as_table(settings), report.as_table(aims(settings)), sep="\n\n")
    if options.json:
        with open(options.json, "w") as file:
            file.write(as_json(found_on, settings) + "\n")
    if options.readme:
        for kind in rungs:
            of_kind = [each for each in settings if each.rungs == kind]
            report.put_between(README, f"ladder {kind}", as_markdown(found_on, of_kind, rounds))
    for kind in rungs if options.figure else ():
        file = Path(options.figure)
        drawing = figure([each for each in settings if each.rungs == kind])
        drawing.savefig(file.with_stem(f"{file.stem}-{kind}"), dpi=150)
    return 0 if all(row.met for row in aims(settings)) else 1


if __name__ == "__main__":
    sys.exit(main())
