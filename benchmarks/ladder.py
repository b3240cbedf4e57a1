"""Compare the course's strategies with torch's own: time, messages, bytes and memory. `rungs.py` lists them.

    python -m benchmarks.ladder                            # tables
    python -m benchmarks.ladder --rungs sharding           # ZeRO-1, 2 and 3 beside torch's and DeepSpeed's
    python -m benchmarks.ladder --readme --rounds 10       # replace the tables, figures and JSON files of README.md
    python -m benchmarks.ladder --json ladder.json --figure ladder.png
    python -m benchmarks.ladder --quick                    # few rounds, to see whether it runs

In each round, every strategy takes one step, in an order that is shuffled in the same way on all ranks. A step lasts
until its slowest rank is done. Ratios are computed within each round, so that a busy moment of the machine affects both
sides, and the table shows their median. "More than the module alone" is how much longer a step takes than that of the
module alone, which sends nothing. It consists of communication that is not hidden and of the strategy's own work.
"""

import argparse
import importlib.metadata
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
from benchmarks.rungs import ALONE, DDP_VIEW, MODELS, RUNGS, TUNED, Target, same_as
from shared import deepspeed_engine, hosts, memory, ranks, wire
from shared.ranks import rankside
from shared.wire import instrumentation
from solutions.strategies import STRATEGIES

WORLD_SIZES = (2, 4)
OURS = {strategy.title for strategy in STRATEGIES.values() if strategy.provider == "course"}
LINKS = (None, "1gbit")  # None: the ranks share this machine's loopback
ROUNDS, QUICK_ROUNDS = 30, 3
WARM_UP_ROUNDS = 2  # after the first step, DDP rebuilds its buckets, and DeepSpeed knows the order of the modules
TIMEOUT_S = 1800.0
MB = 1e6
README = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).with_name("results")


# -- on a rank


@dataclass(frozen=True)
class Measurement:
    """The measurements of one strategy on one rank."""

    times_ms: list[float]
    messages: int
    sent_mb: float
    carried_mb: float  # by the network interface: of all ranks over loopback, of this rank if it has its own host
    peak_mb: float


def on_a_rank(rungs: str, model_name: str, rounds: int) -> dict[str, Measurement]:
    """Measure every strategy on one model. Runs on every rank."""
    device = torch.device(rankside.here.device)
    builds, steps, trained = RUNGS[rungs].builds, {}, {}
    same = same_as(RUNGS[rungs], MODELS[model_name]()[0])
    for name in [name for name in builds if name not in same]:
        module, inputs = MODELS[model_name]()
        trained[name] = builds[name](module.to(device))
        steps[name] = _step_of(*trained[name], [tensor.to(device) for tensor in inputs])
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(round_index).sample(list(steps), len(steps)):
            dist.barrier()
            began_s = time.perf_counter()
            steps[name]()
            instrumentation.synchronize()  # a GPU may still be working when a call has returned
            times_ms[name].append(1e3 * (time.perf_counter() - began_s))
    measured = {}
    for name, step in steps.items():
        dist.barrier()
        with wire.ledger() as log:
            step()
            dist.barrier()
        with memory.peak(*trained[name]) as peak:
            step()
        sent_mb, carried_mb = log.sent_bytes / MB, (log.carried_bytes or 0) / MB
        messages = log.messages - 1  # the barrier was one of them
        peak_mb = peak.peak_bytes / MB
        measured[name] = Measurement(times_ms[name][WARM_UP_ROUNDS:], messages, sent_mb, carried_mb, peak_mb)
    return {name: measured[same.get(name, name)] for name in builds}


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> Callable[[], None]:
    finish = getattr(model, "finish_gradient_sync", lambda: None)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        finish()
        optimizer.step()
        loss.item()  # on a GPU, this line waits until the step is complete

    return step


# -- results


@dataclass(frozen=True)
class Setting:
    """The measurements of one model on some ranks with one kind of link between them."""

    rungs: str
    model: str
    link: str
    ranks: int
    measured: dict[str, Measurement]  # by strategy: the slowest rank's time in each round, and the maximum of the rest

    def ratios(self, strategy: str, over: str = DDP_VIEW) -> list[float]:
        return [mine / other for mine, other in self._rounds(strategy, over)]

    def more_than_alone_ms(self, strategy: str) -> float:
        return statistics.median(mine - alone for mine, alone in self._rounds(strategy, ALONE))

    def median_ms(self, strategy: str) -> float:
        return statistics.median(self.measured[strategy].times_ms)

    def _rounds(self, strategy: str, other: str) -> Iterator[tuple[float, float]]:
        return zip(self.measured[strategy].times_ms, self.measured[other].times_ms, strict=True)

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.link}"


def merged(per_rank: list[dict[str, Measurement]]) -> dict[str, Measurement]:
    """Merge the ranks' measurements. Each round lasts until its slowest rank is done."""
    merged = {}
    for name in per_rank[0]:
        of_strategy = [measured[name] for measured in per_rank]
        times_ms = [max(times) for times in zip(*(each.times_ms for each in of_strategy), strict=True)]
        fields = ("messages", "sent_mb", "carried_mb", "peak_mb")
        merged[name] = Measurement(times_ms, *(max(getattr(each, field) for each in of_strategy) for field in fields))
    return merged


def measure(rungs: list[str], rounds: int, links: tuple[str | None, ...]) -> list[Setting]:
    from benchmarks.ladder import (
        on_a_rank,
    )  # a function of __main__ would be sent to the ranks without this file's names

    settings = []
    for link in links:
        for world_size in WORLD_SIZES:
            with report.started(world_size, link=link):
                for kind, model in itertools.product(rungs, MODELS):
                    began_s = time.perf_counter()
                    per_rank = ranks.run(on_a_rank, kind, model, rounds, timeout_s=TIMEOUT_S)
                    settings.append(Setting(kind, model, link or "loopback", world_size, merged(per_rank)))
                    took_s = time.perf_counter() - began_s
                    print(f"measured in {took_s:.0f} s: {settings[-1]}, {kind}", file=sys.stderr)
    return sorted(settings, key=lambda setting: (rungs.index(setting.rungs), list(MODELS).index(setting.model)))


FIGURE_TEXT = "The step of each strategy, split into the time of the module alone and what it takes more than that"
QUANTITIES = {"times": "time", "peaks": "peak memory", "carried": "bytes carried"}  # by the field of Rungs


def targets(settings: list[Setting]) -> list[report.Row]:
    """Compare the strategies with their targets: torch's own strategies, DeepSpeed's, and one flat all-reduce."""
    rows = []
    for setting in settings:
        for quantity, target in _targets_of(setting.rungs):
            if row := _row(setting, quantity, target):
                rows.append(row)
    return rows


def _targets_of(rungs: str) -> list[tuple[str, Target]]:
    return [(quantity, target) for quantity in QUANTITIES for target in getattr(RUNGS[rungs], quantity)]


def _row(setting: Setting, quantity: str, target: Target) -> report.Row | None:
    """Return a target's row, or None on a system that does not count the bytes that its interfaces carry."""
    if quantity == "times":
        values = setting.ratios(target.mine, target.other)
    else:
        field = {"peaks": "peak_mb", "carried": "carried_mb"}[quantity]
        mine, other = (getattr(setting.measured[name], field) for name in (target.mine, target.other))
        if not other:
            return None
        values = [mine / other]
    return report.Row(f"{setting}: {QUANTITIES[quantity]}, {target.mine} / {target.other}", "×", values, target.most)


HEADER = ["model", "link", "ranks", "strategy", "ms", "ratio", "quartiles", "messages", "MB sent", "carried"]
HEADER += ["more than the module alone, ms", "peak MB"]
TEXT_COLUMNS = 4  # the columns after these contain numbers


def as_rows(settings: list[Setting]) -> list[list[str]]:
    """Return one row per setting and strategy, with the columns of HEADER."""
    rows = []
    for setting in settings:
        for name, measurement in setting.measured.items():
            low, middle, high = statistics.quantiles(setting.ratios(name), n=4, method="inclusive")
            ratio = ["", ""] if name == ALONE else [f"{middle:.2f}", f"{low:.2f}–{high:.2f}"]
            more = "" if name == ALONE else f"{setting.more_than_alone_ms(name):.1f}"
            sent = [f"{measurement.sent_mb:.2f}", f"{measurement.carried_mb:.1f}"]
            numbers = [str(measurement.messages), *sent, more, f"{measurement.peak_mb:.1f}"]
            labels = [setting.model, setting.link, str(setting.ranks), name]
            rows.append([*labels, f"{setting.median_ms(name):.1f}", *ratio, *numbers])
    return rows


def as_table(settings: list[Setting]) -> str:
    lines = [HEADER, *as_rows(settings)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = [str.ljust] * TEXT_COLUMNS + [str.rjust] * (len(HEADER) - TEXT_COLUMNS)
    return "\n".join(
        "  ".join(fit(cell, width) for fit, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_markdown(machine_info: dict, settings: list[Setting], rounds: int) -> str:
    """Format one kind of rungs for README.md: the aims, with one column per setting, the figure, and what is folded."""
    kind = settings[0].rungs
    machine = ", ".join(f"{name} {value}" for name, value in machine_info.items())
    met = [row.met for row in targets(settings)]
    parts = [
        f"**{sum(met)} of {len(met)} aims are met.** One run of {rounds} rounds: {machine}.",
        _aims(settings),
        f"![{FIGURE_TEXT}](results/{kind}.png)",
        _folded("All measurements", _markdown_table(HEADER, as_rows(settings))),
    ]
    if any(title in RUNGS[kind].builds for titles in TUNED.values() for title in titles):
        parts.insert(3, _folded("The settings of the tuned DeepSpeed", tuned_settings()))
    return "\n\n".join(parts)


def _aims(settings: list[Setting]) -> str:
    """Format the ratio of each target in each setting. Missed ones are bold."""
    columns = [f"{each.model}, {each.ranks}" + (f", {each.link}" if each.link in LINKS else "") for each in settings]
    lines = []
    for quantity, target in _targets_of(settings[0].rungs):
        rows = [_row(setting, quantity, target) for setting in settings]
        cells = ["" if row is None else f"{row.median:.2f}" if row.met else f"**{row.median:.2f}**" for row in rows]
        lines.append([f"{QUANTITIES[quantity]}: {target.mine} / {target.other} ≤ {target.most:g}", *cells])
    return _markdown_table(["aim", *columns], lines)


def tuned_settings() -> str:
    """Format what `TUNED` adds to the section `zero_optimization` of DeepSpeed's config."""
    lines = []
    for model, of_model in TUNED.items():
        for title, settings in of_model.items():
            pairs = [f"`{json.dumps(key)}: {json.dumps(value)}`" for key, value in settings.items()]
            lines.append([model.__name__, title, ", ".join(pairs)])
    return _markdown_table(["model", "strategy", "in `zero_optimization`"], lines)


def _folded(summary: str, text: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def _markdown_table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" if cells else "|" + "---|" * len(header) for cells in (header, [], *lines)
    )


def as_json(machine_info: dict, settings: list[Setting], rounds: int) -> str:
    rows = [asdict(row) | {"median": row.median, "met": row.met} for row in targets(settings)]
    measured = [asdict(each) for each in settings]
    return json.dumps({"machine": machine_info, "rounds": rounds, "settings": measured, "targets": rows}, indent=1)


def figure(settings: list[Setting]):
    """Draw the steps of each setting, split into the time of the module alone and the rest. Our strategies are bold."""
    import matplotlib.pyplot as plt

    from shared.plots import COLORS, HATCHES

    names = [name for name in RUNGS[settings[0].rungs].builds if name != ALONE]
    across = len({(setting.link, setting.ranks) for setting in settings})
    down = len(settings) // across
    size = {"figsize": (1.8 + 2.4 * across, 0.5 + (0.9 + 0.19 * len(names)) * down)}
    drawing, panels = plt.subplots(down, across, **size, sharey=True, layout="constrained", squeeze=False)
    for setting, axes in zip(settings, panels.flat, strict=True):
        alone_ms = [setting.median_ms(ALONE)] * len(names)
        more_ms = [max(0.0, setting.more_than_alone_ms(name)) for name in names]
        edge = {"edgecolor": "black", "linewidth": 0.6}
        axes.barh(names, alone_ms, facecolor=COLORS[0], label="the module alone", **edge)
        rest = {"left": alone_ms, "label": "more than the module alone", "hatch": HATCHES[1]}
        drawn = axes.barh(names, more_ms, facecolor=COLORS[4], **rest, **edge)
        axes.bar_label(drawn, [f"{setting.median_ms(name):.0f}" for name in names], padding=3, size=8)
        longest_ms = alone_ms[0] + max(more_ms)
        axes.set(title=f"{setting.model}\n{setting.ranks} ranks, {setting.link}", xlim=(0, 1.2 * longest_ms))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].invert_yaxis()
    for label in itertools.chain.from_iterable(axes.get_yticklabels() for axes in panels[:, 0]):
        label.set(size=9, weight="bold" if label.get_text().partition(",")[0] in OURS else "normal")
    for axes in panels[-1]:
        axes.set_xlabel("ms per step")
    drawing.legend(*panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside upper left")
    plt.close(drawing)
    return drawing


def save(kind: str, machine_info: dict, settings: list[Setting], rounds: int) -> None:
    """Write the results of one kind of rungs into README.md and the files that it refers to."""
    (RESULTS / f"{kind}.json").write_text(as_json(machine_info, settings, rounds) + "\n", encoding="utf-8")
    figure(settings).savefig(RESULTS / f"{kind}.png", dpi=150)
    report.put_between(README, f"ladder {kind}", as_markdown(machine_info, settings, rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the course's strategies with torch's own.")
    parser.add_argument("--rungs", choices=RUNGS, help="strategies to compare (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write all measurements to this file")
    parser.add_argument("--figure", metavar="FILE.png", help="draw figures, one file for each kind of rungs")
    replaced = "replace the tables in benchmarks/README.md, and the figures and JSON files in benchmarks/results/"
    parser.add_argument("--readme", action="store_true", help=replaced)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds per setting (default: {ROUNDS})"
    )
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds per setting")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    machine_info, no_link = report.machine(), hosts.why_not()
    if not deepspeed_engine.why_not():
        machine_info["deepspeed"] = importlib.metadata.version("deepspeed")
    if no_deepspeed := deepspeed_engine.why_not():
        print(f"DeepSpeed is left out: {no_deepspeed}", file=sys.stderr)
    if no_link:
        print(f"Settings with a shaped link are left out: {no_link}", file=sys.stderr)
    rungs = [options.rungs] if options.rungs else list(RUNGS)
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    settings = measure(rungs, rounds, LINKS[:1] if no_link else LINKS)
    print("  ".join(f"{name} {value}" for name, value in machine_info.items()))
    print(as_table(settings), report.as_table(targets(settings)), sep="\n\n")
    if options.json:
        Path(options.json).write_text(as_json(machine_info, settings, rounds) + "\n", encoding="utf-8")
    for kind in rungs:
        kind_settings = [setting for setting in settings if setting.rungs == kind]
        if options.readme:
            save(kind, machine_info, kind_settings, rounds)
        if options.figure:
            file = Path(options.figure)
            figure(kind_settings).savefig(file.with_stem(f"{file.stem}-{kind}"), dpi=150)
    return 0 if all(row.met for row in targets(settings)) else 1


if __name__ == "__main__":
    sys.exit(main())
