"""Run everything that needs GPUs, and write one page: `make gpu`, or `python -m tests.gpu`.

    python -m tests.gpu --dry                                     # the same steps on the CPU, to see whether they run
    python -m tests.gpu --list                                    # what would run on this machine
    python -m tests.gpu --steps start,nccl-semantics              # only some steps
    python -m tests.gpu --steps notebooks --only 04 --minutes 9   # some parts, for at most nine minutes
    python -m tests.gpu --steps benchmark --keep                  # keep the page's results of other parts

The results are report.json, report.md and report.png in build/gpu/. The recorded steps are in traces/ there, and all
output is in log.txt. Each part has its own deadline, and none of its processes is left running. The page names each
part that fails or hangs, with the reason, and the other parts still run. The exit status is 0 if no part failed, even
if an aim was missed, 1 if a part failed, and 2 if nothing could be run.
"""

import argparse
import platform
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from tests.gpu import page, running, steps
from tests.gpu.results import FAILED, NOT_RUN, PartResult, Run
from tests.gpu.steps import nccl

# With --minutes, a part that hangs takes at most this share of the run's time, or this many seconds if that is more.
MOST_OF_A_RUN, LEAST_S = 0.25, 60.0
FOLDER = steps.ROOT / "build" / "gpu"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    facts = _load_facts().ask()
    gpus = len(facts.gpus) or (0 if options.dry else 1)  # without a GPU, we list what would run with one
    version = nccl.as_version(facts.nccl) if facts.gpus else nccl.SHARES_SINCE
    nccl_ranks = nccl.most_ranks(gpus, version, facts.exclusive and not facts.mps)
    planned = chosen(steps.parts(steps.Machine(gpus, nccl_ranks, facts.exclusive, options.dry)), options)
    if not planned:
        print("No part has a name like that. `--list` shows all parts.")
        return 2
    missing = sorted({name for part in planned for name in part.missing})
    if missing:
        print(f"This Python lacks {', '.join(missing)}, so the parts that need them are skipped.")
    if not facts.gpus and not options.dry:
        print(without_gpu(facts.problem))
    if options.list or (not facts.gpus and not options.dry):
        print("\n".join(listed(planned)))
        return 0 if options.list else 2
    info = asdict(facts) | {"python": platform.python_version()}
    run = Run(info, steps.TITLES, datetime.now().strftime("%Y-%m-%d %H:%M"), options.dry, _commit())
    run.missing = missing
    if options.keep:
        keep(run, page.read(options.folder), planned)
    return execute(run, planned, options)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Run what needs GPUs, and write one page.")
    parser.add_argument(
        "--dry", action="store_true", help="run the steps on the CPU, shortened, to see whether they run"
    )
    parser.add_argument("--list", action="store_true", help="only list what would run here")
    parser.add_argument("--steps", default="", help=f"some of {','.join(steps.TITLES)}; default: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="only parts with this text in their names")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end the run after this many minutes")
    parser.add_argument("--keep", action="store_true", help="keep the earlier results of other parts in the folder")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write the results; default: build/gpu")
    options = parser.parse_args(argv)
    options.steps = [name.strip() for name in options.steps.split(",") if name.strip()]
    if unknown := [name for name in options.steps if name not in steps.TITLES]:
        parser.error(f"there is no step {', '.join(unknown)}: the steps are {', '.join(steps.TITLES)}")
    options.folder = options.folder.resolve()
    return options


def chosen(parts: list[steps.Part], options: argparse.Namespace) -> list[steps.Part]:
    return [part for part in parts if part.step in (options.steps or steps.TITLES) and options.only in part.name]


def without_gpu(problem: str) -> str:
    """Say that nothing can run, and why."""
    return (
        f"PyTorch sees no CUDA GPU here ({problem or 'it gives no reason'}), so nothing was run. With one GPU, this "
        "command would run the parts below; `make gpu GPU_ARGS=--dry` tries the same steps on the CPU.\n"
    )


def listed(planned: list[steps.Part]) -> list[str]:
    """Return the steps and their parts as lines of text."""
    lines = []
    for step, proves in steps.TITLES.items():
        names = [
            f"{part.name} (skipped: {part.skip})" if part.skip else part.name for part in planned if part.step == step
        ]
        if names:
            lines += [f"{step}: {proves}", f"    {', '.join(names)}"]
    return lines


def keep(run: Run, before: Run | None, planned: list[steps.Part]) -> None:
    """Keep an earlier run's results of parts that do not run now, if they are from the same kind of machine."""
    if before is None:
        print("There are no earlier results to keep.")
    elif page.name_gpus(before.machine) != page.name_gpus(run.machine) or before.dry != run.dry:
        print("The earlier results are not kept: they are from another machine, or only one of the runs was dry.")
    else:
        now = {(part.step, part.name) for part in planned}
        run.parts = [part for part in before.parts if part.key not in now]
        run.kept_since = (before.kept_since or f"{before.began}, commit {before.commit}") if run.parts else ""


def execute(run: Run, planned: list[steps.Part], options: argparse.Namespace) -> int:
    """Run the parts, and write the page after each of them. Returns the exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no dumps of hung ranks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    options.folder.mkdir(parents=True, exist_ok=True)
    log = options.folder / "log.txt"
    log.write_text("")
    deadline_s = time.monotonic() + 60 * options.minutes
    most_s = max(LEAST_S, MOST_OF_A_RUN * 60 * options.minutes)
    stopped = False
    for part in planned:
        result = PartResult(part.step, part.name, NOT_RUN, reason="this run was stopped")
        if not stopped:
            print(f"{part.step}: {part.name} …", end=" ", flush=True)
            try:
                result = running.run(part, min(most_s, deadline_s - time.monotonic()), log)
            except KeyboardInterrupt:
                stopped = True
            except Exception as error:  # one step must not prevent the others
                result.outcome, result.reason = FAILED, f"make gpu itself failed ({type(error).__name__}: {error})"
            print(in_a_line(result), flush=True)
        run.parts.append(result)
        page.write(run, options.folder)
    return finish(run, options.folder, stopped)


def in_a_line(result: PartResult) -> str:
    took = f" after {result.seconds:.1f} s" if result.seconds else ""
    return f"{result.outcome}{took}" + (f": {result.reason}" if result.reason else "")


def finish(run: Run, folder: Path, stopped: bool) -> int:
    """Draw the figure, write the page once more, and print it."""
    order = list(run.title)
    run.parts.sort(key=lambda part: order.index(part.step))
    page.write(run, folder)
    no_figure = page.draw(folder)
    page.write(run, folder)
    print("\n" + (folder / "report.md").read_text())
    if no_figure:
        print(f"There is no figure, because its program failed: {no_figure}")
    print(f"The results are in {folder}, and all output is in log.txt there.")
    if stopped:
        return 130
    if not any(part.seconds for part in run.parts):
        return 2
    return 1 if run.failed else 0


def _load_facts():
    """Load shared/ranks/facts.py without its package, which needs more than Python."""
    return steps.alone("facts")


def _commit() -> str:
    """Return the commit of the project, or nothing if only a copy of its files is here."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=steps.ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
