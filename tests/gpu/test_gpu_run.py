"""`make gpu` on machines that nobody has here: what it would run, and that nothing keeps it from writing its page."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.deadlines import scaled
from shared.ranks import facts
from tests import machines
from tests.gpu import __main__ as gpu
from tests.gpu import page, steps
from tests.gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT, Aim, Check, PartResult, Run
from tests.gpu.steps import Machine, Part

ROOT = Path(__file__).parents[2]

# -- programs that stand for the parts of a step

REPORT = "import json, sys; open(sys.argv[1] + '/{file}', 'w').write(json.dumps({content}))\n"
GOOD = REPORT.format(
    file="report.json", content={"checks": [{"name": "it", "outcome": PASSED}], "notes": ["3 ms"], "doing": ""}
)
BAD = REPORT.format(
    file="report.json",
    content={"checks": [{"name": "it", "outcome": FAILED, "reason": "2 is not 3"}], "notes": [], "doing": ""},
)
STUCK = REPORT.format(file="report.json", content={"checks": [], "notes": [], "doing": "the first collective"})
DETACHED = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "{mark}"], start_new_session=True)
"""
SLEEP = "import time; time.sleep(300)"
ROW = {"ranks": 1, "strategy": "ZeRO3", "ms": 10.0, "over_plain": 1.1, "mfu": 0.4, "held_gb": 2.0, "formula_gb": 2.0}
ROW |= {"peak_gb": 3.0, "loss": 4.0}
AIM = {"what": "1 rank: ZeRO3 / plain", "unit": "×", "value": 1.1, "most": 1.02, "met": False}
MEASURED = {"rows": [ROW], "failed": [], "aims": [AIM], "placements": {"1": "nccl on cuda:0"}}


@pytest.mark.exhaustive
def test_processes_that_have_used_cuda_get_more_time_to_end():
    assert {part.grace_s for part in steps.parts(Machine(gpus=1, nccl_ranks=1))} == {scaled(20)}
    assert {part.grace_s for part in steps.parts(Machine(gpus=0, dry=True))} == {scaled(5)}


def part(step: str, name: str, source: str, **options) -> Part:
    return Part(step, name, (sys.executable, "-c", source, steps.RESULT), packages=(), **options)


def fakes(mark: str) -> list[Part]:
    """Return parts that end in every way. Processes that some of them leave behind have the mark as an argument."""
    detached = DETACHED.format(mark=mark)
    return [
        part("start", "fine", GOOD),
        part("start", "raises", "raise RuntimeError('no such device')"),
        part("start", "crashes", "import os; os.abort()"),
        part("nccl-semantics", "hangs", STUCK + detached + SLEEP, deadline_s=2.0),
        part("tests", "leaves a process", GOOD + detached),
        part("checks", "is wrong", BAD),
        Part("checks", "lacks a package", ("true",), packages=("no_such_package",)),
        part("notebooks", "is skipped", "", skip="it needs 2 GPUs"),
        part("notebooks", "says nothing", "print('bye')"),
        part("benchmark", "all", REPORT.format(file="report.json", content=MEASURED), reads="benchmark"),
    ]


EXPECTED = {
    "fine": (PASSED, ""),
    "raises": (FAILED, "exit status 1: RuntimeError: no such device"),
    "crashes": (FAILED, "killed by SIGABRT"),
    "hangs": (TIMED_OUT, "ended after 2 s; its last step: the first collective"),
    "leaves a process": (FAILED, "it left 1 process behind: "),
    "is wrong": (FAILED, "it: 2 is not 3"),
    "lacks a package": (SKIPPED, "this Python lacks no_such_package"),
    "is skipped": (SKIPPED, "it needs 2 GPUs"),
    "says nothing": (FAILED, "it reported nothing: bye"),
    "all": (PASSED, ""),
}


def marked(mark: str) -> list[psutil.Process]:
    """Return the running processes with this argument."""
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


@pytest.fixture
def run_gpu(monkeypatch, tmp_path):
    """Run `make gpu` with other parts, on a machine that has one GPU or is said to have others."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run(
        parts: list[Part], *options: str, here: facts.Facts = machines.ONE_GPU, draws: bool = False
    ) -> tuple[int, dict]:
        if not draws:  # a process of its own
            monkeypatch.setattr(page, "draw", lambda folder: "")
        monkeypatch.setattr(steps, "parts", lambda machine: parts)
        monkeypatch.setattr(gpu, "_load_facts", lambda: type("facts", (), {"ask": staticmethod(lambda: here)}))
        status = gpu.main(["--folder", str(tmp_path), *options])
        written = tmp_path / "report.json"
        return status, json.loads(written.read_text()) if written.exists() else {}

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def outcomes(report: dict) -> dict[str, tuple[str, str]]:
    return {part["part"]: (part["outcome"], part["reason"]) for part in report["parts"]}


@pytest.mark.exhaustive
def test_every_part_runs_and_is_named_with_its_reason(run_gpu, tmp_path, capsys):
    mark = str(tmp_path)
    status, report = run_gpu(fakes(mark), draws=True)
    assert status == 1
    found = outcomes(report)
    assert list(found) == list(EXPECTED)
    for name, (outcome, reason) in EXPECTED.items():
        assert found[name][0] == outcome and found[name][1].startswith(reason), (name, found[name])
    assert marked(mark) == [], "a process with a session of its own was left"
    markdown = (tmp_path / "report.md").read_text()
    assert all(name in markdown for name in EXPECTED if EXPECTED[name][0] != PASSED)
    assert markdown in capsys.readouterr().out
    for fact in (
        "1 × NVIDIA H200",
        "580.65",
        "the driver supports 13.0",
        "2.28.9",
        "2.13.0+cu130",
        "| CPU cores | 16 |",
    ):
        assert fact in markdown
    assert (tmp_path / "report.png").stat().st_size > 10_000
    log = (tmp_path / "log.txt").read_text()
    assert "===== start: raises" in log and "RuntimeError: no such device" in log
    assert "time.sleep(300)" in log or 'File "<string>"' in log, "the part that hung should have said where"


@pytest.mark.exhaustive
def test_an_aim_that_is_missed_is_reported_and_is_no_failure(run_gpu, tmp_path):
    status, report = run_gpu([parts for parts in fakes("") if parts.step == "benchmark"])
    assert status == 0
    assert report["aims"] == [{"what": "1 rank: ZeRO3 / plain", "value": 1.1, "unit": "×", "most": 1.02, "met": False}]
    markdown = (tmp_path / "report.md").read_text()
    assert "| 1 rank: ZeRO3 / plain | 1.100 × | ≤ 1.02 × | **missed** |" in markdown
    assert "0 of 1 aims were met" in markdown


@pytest.mark.exhaustive
def test_an_error_of_our_own_is_a_failure_of_that_part_alone(run_gpu):
    broken = part("start", "unreadable", REPORT.format(file="report.json", content={"checks": 1}))
    status, report = run_gpu([broken, part("start", "fine", GOOD)])
    found = outcomes(report)
    assert status == 1 and found["fine"][0] == PASSED
    assert found["unreadable"][0] == FAILED and "make gpu itself failed (TypeError" in found["unreadable"][1]


@pytest.mark.exhaustive
def test_when_the_time_is_used_up_the_rest_is_named(run_gpu):
    late = [part("start", "slow", SLEEP), part("start", "fine", GOOD)]
    status, report = run_gpu(late, "--minutes", "0.03")
    assert status == 1
    assert [outcome for outcome, _ in outcomes(report).values()] == [TIMED_OUT, NOT_RUN]
    assert outcomes(report)["fine"][1] == "the time of this run was used up"


@pytest.mark.exhaustive
def test_results_of_other_parts_are_kept_on_request(run_gpu):
    fine, wrong = part("start", "fine", GOOD), part("checks", "is wrong", BAD)
    run_gpu([wrong, fine])
    status, report = run_gpu([fine, wrong], "--steps", "start", "--keep")
    assert status == 1 and list(outcomes(report)) == ["fine", "is wrong"]
    assert report["kept_since"].startswith("20")
    status, report = run_gpu([fine, wrong], "--steps", "start", "--keep", here=machines.EIGHT_GPUS)
    assert status == 0 and list(outcomes(report)) == ["fine"], "those are from another machine"


@pytest.mark.exhaustive
def test_parts_are_chosen_by_step_and_name(run_gpu, capsys):
    assert list(outcomes(run_gpu(fakes(""), "--steps", "start", "--only", "fine")[1])) == ["fine"]
    assert run_gpu(fakes(""), "--only", "no such part")[0] == 2
    assert "`--list` shows all parts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_gpu(fakes(""), "--steps", "strat")
    assert "there is no step strat: the steps are start, nccl-semantics" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("here", [machines.CPU_ONLY, machines.CUDA_BUILD_WITHOUT_GPU, machines.NO_ANSWER])
def test_without_a_gpu_it_says_so_and_what_it_would_do(run_gpu, capsys, here):
    status, report = run_gpu(fakes(""), here=here)
    assert (status, report) == (2, {})
    first, *rest = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("PyTorch sees no CUDA GPU here (") and "make gpu GPU_ARGS=--dry" in first
    assert "start: Ranks start, run cells, report errors and leave no process" in rest


STOPPED = """
import sys
sys.path.insert(0, {root!r})
from tests import machines
from tests.gpu import test_gpu_run
from tests.gpu import __main__ as gpu, steps
sleeper = test_gpu_run.part("start", "sleeps", test_gpu_run.DETACHED.format(mark={mark!r}) + test_gpu_run.SLEEP)
steps.parts = lambda machine: [sleeper, test_gpu_run.part("start", "fine", test_gpu_run.GOOD)]
gpu._load_facts = lambda: type("facts", (), {{"ask": staticmethod(lambda: machines.ONE_GPU)}})
gpu.page.draw = lambda folder: ""
sys.exit(gpu.main(["--folder", {mark!r}]))
"""


def wait_until(happens, seconds: float) -> bool:
    deadline_s = time.monotonic() + scaled(seconds)
    while not happens() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return happens()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_process_and_a_page(tmp_path, number):
    mark = str(tmp_path)
    program = [sys.executable, "-c", STOPPED.format(root=str(ROOT), mark=mark)]
    process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert wait_until(lambda: marked(mark), 60.0), "the part did not start its process"
    os.kill(process.pid, number)
    printed, _ = process.communicate(timeout=scaled(120.0))
    assert wait_until(lambda: not marked(mark), 30.0), printed
    if number != signal.SIGKILL:
        assert process.returncode == 130, printed
        found = outcomes(json.loads((tmp_path / "report.json").read_text()))
        assert found == {name: (NOT_RUN, "this run was stopped") for name in ("sleeps", "fine")}
        assert "What did not run" in (tmp_path / "report.md").read_text()


# -- a Python without packages


@pytest.mark.exhaustive
def test_it_needs_nothing_but_python_to_say_what_is_missing(tmp_path):
    command = [sys.executable, "-S", "-m", "tests.gpu", "--dry", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert re.match(r"This Python lacks .*jinja2.*pytest-timeout.*scikit-learn.*torch", done.stdout)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {part["outcome"] for part in report["parts"]} == {SKIPPED}
    assert all("this Python lacks" in part["reason"] for part in report["parts"])


@pytest.mark.exhaustive
def test_programs_need_only_the_packages_that_their_parts_name():
    known = {*steps.NOTEBOOKS, "jupyterlab", "nbclient", "nbgrader", "jupytext", "hypothesis", "xdist", "joblib"}
    modules = {"start": "tests.gpu.starting", "nccl-semantics": "tests.gpu.semantics", "benchmark": "benchmarks.gpu"}
    modules["traces"] = "tests.gpu.traces"
    programs: dict[tuple[str, ...], list[str]] = {}  # those that need the same packages, in one process
    for step, module in modules.items():
        packages = next(part.packages for part in steps.parts(Machine(1)) if part.step == step)
        programs.setdefault(packages, []).append(module)
    for packages, names in programs.items():
        blocked = sorted(known - set(packages))
        source = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\nimport {', '.join(names)}"
        done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{names}: {done.stderr}"


# -- what would run


def by_name(machine: Machine, step: str) -> dict[str, Part]:
    return {part.name: part for part in steps.parts(machine) if part.step == step}


@pytest.mark.exhaustive
def test_with_one_gpu_and_an_old_nccl_it_tries_nccl_alone_and_shares_the_gpu_over_gloo():
    found = by_name(Machine(1, nccl_ranks=1), "start")
    assert [name for name, part in found.items() if not part.skip] == [
        *("NCCL, 1 rank", "gloo on the GPU, 2 ranks", "gloo on the CPU, 2 ranks"),
        *("gloo on the GPU, 4 ranks", "gloo on the CPU, 4 ranks"),
    ]
    assert found["NCCL on shared GPUs, 2 ranks"].skip == "this NCCL cannot run 2 ranks on 1 GPU"
    semantics = by_name(Machine(1, nccl_ranks=1), "nccl-semantics")
    assert [name for name, part in semantics.items() if not part.skip] == ["host and stream, 1 rank"]
    assert semantics["unbatched ring"].skip == "it needs 3 GPUs, and this machine has 1 GPU"


@pytest.mark.exhaustive
def test_with_one_gpu_that_ranks_can_share_nothing_is_skipped(monkeypatch):
    monkeypatch.setattr(steps.nccl, "to_preload", lambda: "libnccl.so.2")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    machine = Machine(1, nccl_ranks=4)
    assert not any(part.skip for part in steps.parts(machine))
    start = by_name(machine, "start")
    assert start["NCCL on shared GPUs, 4 ranks"].command[-4:] == ("--backend", "nccl:shared", "--device", "cuda")
    semantics = by_name(machine, "nccl-semantics")
    assert semantics["host and stream, 1 rank"].environment == {}
    assert semantics["unbatched ring"].environment == steps.nccl.environment(3) | {"LD_PRELOAD": "libnccl.so.2"}
    assert all(not part.environment for step in ("checks", "notebooks") for part in by_name(machine, step).values())


@pytest.mark.exhaustive
def test_what_shows_most_runs_first():
    found = steps.parts(Machine(1, nccl_ranks=4))
    assert [part.turn for part in found] == sorted(part.turn for part in found)
    first = [part for part in found if part.turn == 0]
    assert {part.step for part in first} >= {"start", "nccl-semantics", "tests", "checks"} and len(first) < 20


@pytest.mark.exhaustive
def test_with_eight_gpus_every_rank_has_its_own():
    found = by_name(Machine(8, nccl_ranks=8), "start")
    assert found["NCCL, 8 ranks"].command[-6:] == ("--ranks", "8", "--backend", "nccl", "--device", "cuda")
    assert not any(part.skip for part in steps.parts(Machine(8, nccl_ranks=8)))


@pytest.mark.exhaustive
def test_ranks_do_not_share_a_gpu_that_only_one_process_may_use():
    machine = Machine(1, nccl_ranks=1, exclusive=True)
    assert "compute mode" in by_name(machine, "start")["gloo on the GPU, 2 ranks"].skip
    assert all(part.environment == {"RANKS_BACKEND": "gloo:cpu"} for part in by_name(machine, "checks").values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gpus", "nccl_ranks"), [(1, 1), (1, 4), (4, 4)])
def test_notebooks_and_checks_stay_on_the_cpu_where_nccl_cannot_run_four_ranks(gpus, nccl_ranks):
    found = by_name(Machine(gpus, nccl_ranks), "notebooks")
    ran = sorted(word for part in found.values() for word in part.command if word.endswith(".ipynb"))
    assert ran == sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[cs][ho]*s/*.ipynb"))
    for name, part in [*found.items(), *by_name(Machine(gpus, nccl_ranks), "checks").items()]:
        assert part.environment == ({"RANKS_BACKEND": "gloo:cpu"} if nccl_ranks < 4 else {})
        assert name.endswith(" (on the CPU)") == (nccl_ranks < 4)


@pytest.mark.exhaustive
def test_every_test_marked_gpu_and_every_solution_with_checks_is_run():
    assert {"test_gpu", "test_memory"} <= set(by_name(Machine(1), "tests"))
    assert "test_gpu_run" not in by_name(Machine(1), "tests")
    assert set(by_name(Machine(4), "checks")) >= {"first_collectives", "manual_ddp", "zero1", "zero2", "zero3"}


# -- the page


def a_run() -> Run:
    """Return a run in which everything occurs."""
    results = [
        PartResult("start", "NCCL, 1 rank", PASSED, 12.0, checks=[Check("ranks start", PASSED)], notes=["5 ms"]),
        PartResult("nccl-semantics", "ring", TIMED_OUT, 240.0, "ended after 240 s"),
        PartResult("tests", "test_gpu", FAILED, 60.0, "a | b", [Check("one", FAILED, "1"), Check("two", FAILED, "2")]),
        PartResult("checks", "zero3", NOT_RUN, reason="this run was stopped"),
        *(PartResult("notebooks", f"chapters/{i:02}", SKIPPED if i % 5 == 4 else PASSED, 30.0, "x") for i in range(26)),
        PartResult("benchmark", "all", PASSED, 300.0, aims=[Aim("a", 1.0, "×", 1.02)], benchmark=MEASURED),
    ]
    machine = json.loads(machines.ONE_GPU.to_json()) | {"python": "3.12.3"}
    return Run(machine, steps.TITLES, "2026-11-22 15:00", commit="abc", parts=results)


def test_a_run_survives_json():
    assert Run.from_dict(json.loads(json.dumps(a_run().to_dict()))) == a_run()


def test_the_page_is_valid_markdown_tables():
    lines = page.as_markdown(a_run(), has_figure=True).splitlines()
    assert lines[0] == "# `make gpu` on 1 × NVIDIA H200"
    assert "| benchmark | Time, memory and MFU of every strategy beside PyTorch's own | 1 passed | 300 |" in lines
    assert "- **nccl-semantics: ring** ran out of time after 240 s: ended after 240 s" in lines
    assert "1 of 1 aims were met; an aim is not a test." in "\n".join(lines)
    tables = re.findall(r"(?:^\|.*\|$\n?)+", "\n".join(lines), flags=re.MULTILINE)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}) == 1, table


@pytest.mark.exhaustive
def test_the_figure_shows_every_outcome(tmp_path):
    folder = tmp_path
    page.write(a_run(), folder)
    assert page.draw(folder) == ""
    assert (folder / "report.png").stat().st_size > 20_000
    (folder / "report.json").write_text("{}")
    assert "KeyError" in page.draw(folder) or "TypeError" in page.draw(folder)
    assert not (folder / "report.png").exists()


# -- the programs


def told(tmp_path, *command: str) -> dict[str, str]:
    """Run a program of a part where there is no GPU. Returns the reasons of its failed checks, by name."""
    import torch  # Most tests, and the programs that import this module, do without.

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    program = [sys.executable, "-m", *command, "--result", str(tmp_path / "report.json")]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    failed = {check["name"]: check["reason"] for check in checks if check["outcome"] == FAILED}
    assert done.returncode == (1 if failed else 0), done.stderr
    return failed


@pytest.mark.exhaustive
def test_ranks_that_are_not_on_the_gpu_do_not_pass_for_ranks_that_are(tmp_path):
    failed = told(tmp_path, "tests.gpu.starting", "--ranks", "2", "--backend", "gloo", "--device", "cuda")
    assert list(failed) == ["their device is cuda", "a send from a GPU over gloo is rejected"]
    assert "got 'ranks 0, 1 │ cpu" in failed["their device is cuda"]


@pytest.mark.exhaustive
def test_a_probe_that_raises_says_why(tmp_path):
    failed = told(tmp_path, "tests.gpu.semantics", "stream", "--ranks", "1")
    assert failed.keys() == {"the probe ends"} and "rank 0 at an error: " in failed["the probe ends"]
