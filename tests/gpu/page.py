"""Writes the results of a run: report.json, report.md and report.png."""

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT, PartResult, Run
from tests.gpu.steps import ROOT

FIGURE_S = 120.0


def write(run: Run, folder: Path) -> None:
    """Write the results as JSON and Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(run.to_dict(), indent=1))
    (folder / "report.md").write_text(as_markdown(run, (folder / "report.png").exists()))


def draw(folder: Path) -> str:
    """Draw the figure from report.json, in a process of its own. Returns why there is none, or an empty text."""
    (folder / "report.png").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.figure", str(folder.resolve())]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=FIGURE_S)
    except subprocess.TimeoutExpired:
        return f"drawing it took more than {FIGURE_S:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]


def read(folder: Path) -> Run | None:
    """Read the results of an earlier run. Returns None if there are none that can be read."""
    try:
        return Run.from_dict(json.loads((folder / "report.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- Markdown


def as_markdown(run: Run, has_figure: bool) -> str:
    """Return the page."""
    name = name_gpus(run.machine) or "a machine without a GPU"
    title = f"# {'A dry run of `make gpu`' if run.dry else '`make gpu`'} on {name}"
    sections = [
        title,
        _warning(run),
        _machine(run),
        _summary(run),
        _steps(run),
        _failures(run),
        _skipped(run),
        _aims(run),
    ]
    sections += [_measured(run), _benchmark(run)]
    if has_figure:
        sections.append("![The result of every part, and the benchmark](report.png)")
    return "\n\n".join(filter(None, sections)) + "\n"


def _warning(run: Run) -> str:
    if not run.dry:
        return ""
    return (
        "This was a dry run on the CPU, with a tiny model. It shows that the steps run. Its times and aims say nothing "
        "about GPUs."
    )


def name_gpus(machine: dict) -> str:
    """Return the number and the models of a machine's GPUs, or nothing if there are none."""
    names = ", ".join(sorted({gpu["name"] for gpu in machine["gpus"]}))
    return f"{len(machine['gpus'])} × {names}" if names else ""


def _machine(run: Run) -> str:
    machine = run.machine
    rows = {
        "GPUs": name_gpus(machine) or "none",
        "memory per GPU": ", ".join(sorted({f"{gpu['total_bytes'] / 2**30:.0f} GiB" for gpu in machine["gpus"]})),
        "links between GPUs": ", ".join(machine["links"]),
        "NVIDIA driver": machine["driver"],
        "CUDA": ", ".join(filter(None, [_built_for(machine), _supports(machine)])),
        "NCCL": machine["nccl"] or "not in this build of PyTorch",
        "PyTorch": machine["torch"] or "not installed",
        "Python": machine["python"],
        "CPU cores": machine["cores"],
        "/dev/shm": f"{machine['shm_bytes'] / 2**20:.0f} MiB" if machine["shm_bytes"] else "",
        "run": ", ".join(filter(None, [run.began, f"commit {run.commit}" if run.commit else ""])),
        "kept": f"results of other parts, from runs since {run.kept_since}" if run.kept_since else "",
        "packages that are missing": ", ".join(run.missing),
    }
    return _table(["machine", ""], [[name, str(value)] for name, value in rows.items() if value])


def _built_for(machine: dict) -> str:
    return f"PyTorch is built for {machine['cuda_build']}" if machine["cuda_build"] else "PyTorch is a CPU build"


def _supports(machine: dict) -> str:
    return f"the driver supports {machine['driver_cuda']}" if machine["driver_cuda"] else ""


def _summary(run: Run) -> str:
    counts = {outcome: sum(part.outcome == outcome for part in run.parts) for outcome in (PASSED, SKIPPED, NOT_RUN)}
    said = [f"{counts[PASSED]} of {len(run.parts)} parts passed, {len(run.failed)} failed"]
    said += [f"{counts[outcome]} {outcome}" for outcome in (SKIPPED, NOT_RUN) if counts[outcome]]
    summary = ", ".join(said) + "."
    if run.aims:
        summary += f" {sum(aim.met for aim in run.aims)} of {len(run.aims)} aims were met; an aim is not a test."
    return summary


def _steps(run: Run) -> str:
    rows = []
    for step, proves in run.title.items():
        parts = run.of(step)
        rows.append([step, proves, run.counts(step) or "not chosen", f"{sum(part.seconds for part in parts):.0f}"])
    return _table(["step", "what it shows", "parts", "seconds"], rows)


def _failures(run: Run) -> str:
    lines = [f"- **{part.step}: {part.part}** {_in_words(part)}" for part in run.failed]
    lines += [
        f"    - {check.name}: {check.reason}"
        for part in run.failed
        for check in part.checks
        if check.outcome == FAILED and len(part.checks) > 1 and not part.reason.startswith(f"{check.name}:")
    ]
    return "\n".join(["## What failed", "", *lines]) if lines else ""


def _in_words(part: PartResult) -> str:
    how = "ran out of time" if part.outcome == TIMED_OUT else "failed"
    return f"{how} after {part.seconds:.0f} s: {part.reason}"


def _skipped(run: Run) -> str:
    """Name the parts that did not run, by reason."""
    by_reason: dict[str, list[str]] = {}
    for part in run.parts:
        if part.outcome in (SKIPPED, NOT_RUN):
            by_reason.setdefault(part.reason, []).append(f"{part.step}: {part.part}")
    lines = [f"- {'; '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return "\n".join(["## What did not run", "", *lines]) if lines else ""


def _aims(run: Run) -> str:
    rows = [
        [aim.what, f"{aim.value:.3f} {aim.unit}", f"≤ {aim.most:g} {aim.unit}", "met" if aim.met else "**missed**"]
        for aim in run.aims
    ]
    return "## Aims\n\n" + _table(["what", "measured", "aim", ""], rows) if rows else ""


def _measured(run: Run) -> str:
    rows = [[part.step, part.part, note] for part in run.parts for note in part.notes]
    return "## Measured\n\n" + _table(["step", "part", "result"], rows) if rows else ""


def _benchmark(run: Run) -> str:
    """Return the benchmark's table."""
    rows = []
    for row in (row for part in run.parts if part.benchmark for row in part.benchmark["rows"]):
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        sizes = [f"{row[name]:.2f}" for name in ("held_gb", "formula_gb", "peak_gb")]
        times = [f"{row['ms']:.1f}", f"{row['over_plain']:.3f}", mfu]
        rows.append([str(row["ranks"]), row["strategy"], *times, *sizes, f"{row['loss']:.3f}"])
    heading = ["ranks", "strategy", "ms", "× plain", "MFU", "held, GB", "formula, GB", "peak, GB", "loss"]
    where = [
        f"- world size {size}: {placement}"
        for part in run.parts
        if part.benchmark
        for size, placement in part.benchmark["placements"].items()
    ]
    return "\n".join(["## Benchmark", "", *where, "", _table(heading, rows)]) if rows else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
