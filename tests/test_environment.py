"""The four descriptions of the environment say the same, and bootstrap.py keeps its promises.

No test here installs anything: a fake pip stands in for the real one.
"""

import ast
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import bootstrap

ROOT = Path(__file__).resolve().parent.parent
FLOATING = {"numpy", "scipy"}  # Python 3.11 and 3.12 get different ones
PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton")


# --- pyproject.toml, constraints.txt, environment.yml -----------------------------------------------


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def constraints() -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    assert len(by_name) == len(requirements), "a package stands in constraints.txt twice"
    return by_name


@pytest.fixture(scope="module")
def conda() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def declared(project) -> list[Requirement]:
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for line in [*project["dependencies"], *(line for extra in extras for line in extra)]]


def is_pinned(requirement: Requirement) -> bool:
    operators = [(specifier.operator, "*" in specifier.version) for specifier in requirement.specifier]
    return operators == [("==", False)]


def test_every_declared_package_is_pinned(project, constraints):
    names = {canonicalize_name(requirement.name) for requirement in declared(project)} - FLOATING
    assert len(names) > 10
    missing = [name for name in names if name not in constraints or not is_pinned(constraints[name])]
    assert not missing


def test_every_package_that_they_bring_is_pinned(project, constraints):
    brought = closure(declared(project))
    assert "tornado" in brought  # two levels down from any package that we name
    missing = {name for name in brought - FLOATING if not name.startswith(PINNED_BY_TORCH)} - set(constraints)
    assert not missing


def closure(requirements: list[Requirement]) -> set[str]:
    """Walk what is installed here, from our own requirements down."""
    seen, todo = set(), [(canonicalize_name(r.name), extra) for r in requirements for extra in ("", *r.extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), wanted) for wanted in ("", *needed.extras)]
    return {name for name, _ in seen}


def test_every_pin_is_for_the_oldest_python_that_is_taken(constraints):
    """Debian 12 has 3.11.2. Where a pin is for 3.11.5, pip tries the versions of all others for an hour."""
    oldest = f"{bootstrap.dotted(bootstrap.OLDEST)}.0"
    needs = {
        name: importlib.metadata.metadata(name)["Requires-Python"] or "" for name in installed() & set(constraints)
    }
    assert len(needs) > 80
    assert {
        name: need for name, need in needs.items() if name not in FLOATING and oldest not in SpecifierSet(need)
    } == {}


def installed() -> set[str]:
    return {canonicalize_name(each.metadata["Name"]) for each in importlib.metadata.distributions()}


def test_every_constraint_is_a_pin_except_what_must_float(constraints):
    assert {name for name, requirement in constraints.items() if not is_pinned(requirement)} == FLOATING


def test_no_constraint_names_a_build(project, constraints):
    """torch==2.13.0+cpu would not install where there is a GPU."""
    assert not [name for name, requirement in constraints.items() if "+" in str(requirement.specifier)]
    assert canonicalize_name(project["name"]) not in constraints


def test_conda_installs_the_same_through_pip(conda):
    (pip,) = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-c constraints.txt", "-e .[dev]"]
    names = [entry.split()[0] for entry in conda["dependencies"] if isinstance(entry, str)]
    assert names == ["python", "pip"], "another package from conda would escape the pins"


def test_python_versions_agree(project, conda):
    (line,) = [entry for entry in conda["dependencies"] if str(entry).startswith("python ")]
    conda_versions, project_versions = SpecifierSet(line.split(" ", 1)[1]), SpecifierSet(project["requires-python"])
    minors = [(3, minor) for minor in range(8, 20)]
    accepted = [version for version in minors if bootstrap.OLDEST <= version <= bootstrap.NEWEST]
    assert [version for version in minors if bootstrap.dotted(version) in conda_versions] == accepted
    assert min(version for version in minors if bootstrap.dotted(version) in project_versions) == bootstrap.OLDEST
    image = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["image"]
    assert tuple(map(int, image.split(":")[1].split("."))) in accepted


# --- the commands -----------------------------------------------------------------------------------


def make(*arguments, cwd=ROOT, **variables) -> subprocess.CompletedProcess:
    command = ["make", "--no-print-directory", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**environment, **variables})


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("lab", ["bootstrap.py\n", "-m jupyterlab"]),
        ("test", ["bootstrap.py --dev\n", "-m tests.run"]),
        ("notebooks", ["bootstrap.py --dev\n", "-m instructor.build"]),
        ("bench", ["bootstrap.py --dev\n", "-m benchmarks.ranks", "-m benchmarks.collectives"]),
        ("clean", ["rm -rf .venv"]),
    ],
)
def test_make_target_runs_its_steps_in_order(target, steps):
    shown = make("--dry-run", target)
    assert shown.returncode == 0, shown.stderr
    positions = [shown.stdout.find(step) for step in steps]
    assert -1 not in positions and positions == sorted(positions), shown.stdout


def test_make_alone_lists_the_targets():
    listed = re.findall(r"^make (\w+) +\S", make().stdout, flags=re.MULTILINE)
    assert listed == [
        "help",
        "lab",
        "doctor",
        "test",
        "mutants",
        "gpu",
        "notebooks",
        "bench",
        "release",
        "grade",
        "clean",
    ]


def test_make_lab_hands_its_arguments_to_jupyterlab():
    assert "--no-browser --port 9999" in make("--dry-run", "lab", "LAB_ARGS=--no-browser --port 9999").stdout


def test_make_lab_opens_the_start_page_only_where_it_exists(tmp_path):
    """JupyterLab exits with an error when told to open a file that is not there."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    assert "00_ranks.ipynb" not in make("--dry-run", "lab", cwd=tmp_path).stdout
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "00_ranks.ipynb").touch()
    assert make("--dry-run", "lab", cwd=tmp_path).stdout.rstrip().endswith(" chapters/00_ranks.ipynb")


def test_make_clean_leaves_an_environment_elsewhere_alone(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for folder in (".venv", "course/shared/__pycache__", "elsewhere", "source"):
        (tmp_path / folder).mkdir(parents=True)
    assert make("clean", cwd=tmp_path, COURSE_VENV="elsewhere").returncode == 0
    assert {path.name for path in tmp_path.rglob("*")} == {"Makefile", "course", "shared", "elsewhere", "source"}


# --- bootstrap: what it refuses ---------------------------------------------------------------------


def test_bootstrap_is_readable_for_an_old_python():
    ast.parse((ROOT / "bootstrap.py").read_text(), feature_version=(3, 6))


PYTHONS = {
    "old": ((3, 10), True),
    "new": ((3, 15), True),
    "bare": ((3, 12), False),
    "good": ((3, 11), True),
    "gone": None,
}


@pytest.mark.parametrize("offered", [["good"], ["old", "good"], ["gone", "new", "bare", "good", "old"]])
def test_the_first_suitable_python_is_taken(offered):
    assert bootstrap.find_python(offered, PYTHONS.get) == ("good", (3, 11))


@pytest.mark.parametrize(
    ("offered", "says"),
    [
        (["old"], "needs Python 3.11 to 3.14, and this machine offers only 3.10 (old)"),
        (["new", "old"], "offers only 3.15 (new), 3.10 (old)"),
        (["gone"], "offers none that works"),
        (["old", "bare"], "python3.12-venv"),
        (["bare"], "sudo apt install python3-venv"),
    ],
)
def test_unsuitable_pythons_are_refused_in_one_sentence(offered, says):
    with pytest.raises(bootstrap.SetupError) as refusal:
        bootstrap.find_python(offered, PYTHONS.get)
    assert says in str(refusal.value)
    assert_is_one_sentence(str(refusal.value))


def assert_is_one_sentence(text: str) -> None:
    assert text.endswith(".") and "\n" not in text and not re.search(r"\. [A-Z]", text), text


def test_probe_asks_the_python_itself(tmp_path):
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\necho no such version; exit 127\n")
    broken.chmod(0o755)
    assert bootstrap.probe(sys.executable) == (sys.version_info[:2], True)
    assert bootstrap.probe(broken) is None
    assert bootstrap.probe(tmp_path / "missing") is None


def test_a_full_disk_is_refused_in_one_sentence(tmp_path):
    bootstrap.check_disk(3 * 10**9, 3, tmp_path)
    with pytest.raises(bootstrap.SetupError, match=r"need about 3 GB, and .* has 2\.9 GB free") as refusal:
        bootstrap.check_disk(2.9 * 10**9, 3, tmp_path)
    assert_is_one_sentence(str(refusal.value).replace(str(tmp_path), "folder"))


def test_free_space_is_that_of_the_disk_the_folder_will_be_on(tmp_path):
    free = bootstrap.free_bytes(tmp_path / "not" / "there" / "yet")
    assert free == pytest.approx(bootstrap.free_bytes(tmp_path), rel=0.1) and free > 0


# --- bootstrap: what it trusts ----------------------------------------------------------------------


class FakeRun:
    """Stands in for running `python -m venv` and pip: notes each call, and fails or is stopped on demand."""

    def __init__(self):
        self.calls, self.pip_fails, self.pip_says = [], False, "ERROR: no network"

    def __call__(self, command, cwd):
        step = command[command.index("-m") + 1]
        self.calls.append(step)
        if step == "venv":
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir()
            python.symlink_to(sys.executable)
        if step == "pip":
            (Path(command[0]).parent / "installed").touch()
            if isinstance(self.pip_fails, type):
                raise self.pip_fails
        return (1, [self.pip_says]) if step == "pip" and self.pip_fails else (0, [])


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course in a folder of its own: `course(dev=…)` sets it up, with a fake pip, unless it is ready."""
    (tmp_path / "pyproject.toml").write_text("dependencies")
    (tmp_path / "constraints.txt").write_text("torch==1")
    monkeypatch.setattr(bootstrap, "candidate_pythons", lambda: [sys.executable])
    monkeypatch.setattr(bootstrap, "check_disk", lambda *_: None)

    def bring_up(dev=False) -> list[str]:
        bring_up.run.calls.clear()
        if not bootstrap.is_ready(bring_up.root, bring_up.venv, dev):
            bootstrap.set_up(bring_up.root, bring_up.venv, dev, bring_up.run)
        return list(bring_up.run.calls)

    bring_up.root, bring_up.venv, bring_up.run = tmp_path, tmp_path / ".venv", FakeRun()
    return bring_up


def test_a_second_run_has_nothing_to_do(course):
    assert course() == ["venv", "pip"]
    assert course() == []


def test_the_dev_environment_serves_both_commands(course):
    assert course(dev=False) == ["venv", "pip"]
    assert course(dev=True) == ["pip"], "the dev packages are added, nothing is made anew"
    assert course(dev=True) == []
    assert course(dev=False) == [], "make lab after make test"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_over(course, name):
    course()
    (course.root / name).write_text("other")
    assert course() == ["pip"]
    assert course() == []


@pytest.mark.parametrize("failure", [True, KeyboardInterrupt])
@pytest.mark.parametrize("after", ["nothing", "a finished set-up"])
def test_a_set_up_that_failed_is_made_anew(course, failure, after):
    if after != "nothing":
        course()
    course.run.pip_fails = failure
    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else bootstrap.SetupError):
        course(dev=True)
    assert not bootstrap.is_ready(course.root, course.venv, dev=False)
    course.run.pip_fails = False
    assert course() == ["venv", "pip"], "what a broken pip leaves cannot be installed over"


def test_a_venv_that_could_not_be_made_is_made_anew(course):
    with pytest.raises(bootstrap.SetupError, match="could not make the environment"):
        bootstrap.set_up(course.root, course.venv, False, lambda command, cwd: (int("venv" in command), ["no disk"]))
    assert course() == ["venv", "pip"]


@pytest.mark.parametrize(
    ("pip_says", "says"), [("ERROR: no route", "check the network"), ("[Errno 28] No space left on device", "disk")]
)
def test_a_failed_pip_is_explained_below_its_last_lines(course, capsys, pip_says, says):
    course.run.pip_fails, course.run.pip_says = True, pip_says
    with pytest.raises(bootstrap.SetupError, match=says) as refusal:
        course()
    assert pip_says in capsys.readouterr().out
    assert_is_one_sentence(str(refusal.value))


def test_an_environment_whose_python_is_gone_is_made_anew(course):
    course()
    (course.venv / "bin" / "python").unlink()
    assert course() == ["venv", "pip"]


def test_a_course_that_was_moved_is_set_up_anew(course):
    """The scripts in an environment hold its path."""
    course()
    moved = course.root / "moved"
    moved.mkdir()
    for name in (".venv", "pyproject.toml", "constraints.txt"):
        (course.root / name).rename(moved / name)
    course.root, course.venv = moved, moved / ".venv"
    assert course() == ["venv", "pip"]


def test_a_folder_that_is_not_ours_is_never_erased(course):
    course.venv.mkdir()
    (course.venv / "thesis.tex").touch()
    with pytest.raises(bootstrap.SetupError, match="was not made by bootstrap") as refusal:
        course()
    assert (course.venv / "thesis.tex").exists()
    assert_is_one_sentence(str(refusal.value).replace(str(course.venv), "It").replace("bootstrap.py", ""))


def test_the_mark_of_another_python_version_is_not_trusted(course, monkeypatch):
    course()
    assert bootstrap.is_ready(course.root, course.venv, False)
    assert not bootstrap.is_ready(course.root, course.venv, False, ask=lambda _: ((3, 99), True))


def test_a_second_set_up_waits_for_the_first(tmp_path):
    """Else `make test` would erase what `make lab` in another terminal has yet to finish."""
    lock, done = tmp_path / "lock", []
    lock.touch()

    def second():
        with bootstrap.one_at_a_time(lock):
            done.append("second")

    thread = threading.Thread(target=second)
    with bootstrap.one_at_a_time(lock):
        thread.start()
        thread.join(0.2)
        done.append("first")
    thread.join(10)
    assert done == ["first", "second"]


def test_windows_is_refused_in_one_sentence():
    bootstrap.check_system("posix")
    with pytest.raises(bootstrap.SetupError, match="WSL") as refusal:
        bootstrap.check_system("nt")
    assert_is_one_sentence(str(refusal.value))


def test_a_command_shows_its_last_lines_and_exit_code(tmp_path):
    code, tail = bootstrap.run_command([sys.executable, "-c", "print('a\\nb'); exit(3)"], str(tmp_path))
    assert (code, tail) == (3, ["a", "b"])


def test_a_stopped_command_may_clean_up(tmp_path, monkeypatch):
    """Ctrl-C reaches pip too, and pip then removes its downloads."""
    monkeypatch.setattr(bootstrap, "show_progress", lambda line: signal.raise_signal(signal.SIGINT) if line else None)
    source = "import time; print('downloading', flush=True); time.sleep(0.3); open('cleaned', 'w')"
    with pytest.raises(KeyboardInterrupt):
        bootstrap.run_command([sys.executable, "-c", source], str(tmp_path))
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (OSError("read-only"), 1)])
def test_no_traceback_reaches_the_newcomer(monkeypatch, capsys, tmp_path, raised, code):
    def fail(*_):
        raise raised

    monkeypatch.setenv("COURSE_VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(bootstrap, "set_up", fail)
    assert bootstrap.main([]) == code
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
