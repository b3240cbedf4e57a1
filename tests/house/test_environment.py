"""The descriptions of the environment agree, and bootstrap.py builds it, shares it, and never breaks one in use.

Most tests here run bootstrap.py with a fake Python whose `venv` and `pip` finish at once. One test uses the real ones
to install a tiny package.
"""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from shared.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "bootstrap.py"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
FLOATING = {"numpy", "scipy"}  # Python 3.11 and 3.12 get different ones
PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton")


# --- pyproject.toml, constraints.txt, environment.yml -----------------------------------------------


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def constraints() -> dict[str, Requirement]:
    return pins_in("constraints.txt")


def pins_in(name: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    assert len(by_name) == len(requirements), f"a package is listed in {name} twice"
    return by_name


@pytest.fixture(scope="module")
def conda() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def closure(requirements: list[Requirement]) -> set[str]:
    """Return the packages that these requirements need, directly and indirectly, if they are installed here."""
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


def test_every_package_that_is_installed_is_pinned(project, constraints):
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    needed = closure([Requirement(line) for line in declared])
    assert "tornado" in needed, "tornado is two levels below the packages that we name"
    assert {name for name in needed if not name.startswith(PINNED_BY_TORCH)} <= set(constraints)


def test_every_package_of_the_site_is_pinned(project, constraints):
    pytest.importorskip("myst_nb", reason="the extra `site` is not installed here")
    needed = closure([Requirement(line) for line in project["optional-dependencies"]["site"]])
    assert "docutils" in needed and {name for name in needed if not name.startswith(PINNED_BY_TORCH)} <= set(
        constraints
    )


def test_a_constraint_is_one_version_for_every_machine(constraints):
    """`torch==2.13.0+cpu` would not install on a machine with a GPU."""
    pins = {name: [(pin.operator, pin.version) for pin in r.specifier] for name, r in constraints.items()}
    exact = {name for name, [(operator, version), *more] in pins.items() if operator == "==" and not more}
    assert set(constraints) - exact == FLOATING
    assert not [name for name in exact if re.search(r"[+*]", str(constraints[name].specifier))]


def test_pins_for_gpus_replace_pins_by_newer_versions(constraints):
    """bootstrap.py replaces whole lines, and finds them by the name before `==`."""
    for pin in ("torch==2.13.0", "torch==2.14.1"):
        assert any(pin in (ROOT / name).read_text().splitlines() for name in ("constraints.txt", "constraints-gpu.txt"))
    for name, pin in pins_in("constraints-gpu.txt").items():
        ((usual,), (newer,)) = constraints[name].specifier, pin.specifier
        assert usual.operator == newer.operator == "==" and Version(usual.version) < Version(newer.version)
        assert constraints[name].name == pin.name and "+" not in newer.version


def test_every_supported_python_can_install_every_pin(constraints):
    """Debian 12 has 3.11.2. If a pin needed 3.11.5, pip would try other versions of everything for an hour."""
    needs = {
        name: importlib.metadata.metadata(name)["Requires-Python"] or ""
        for name in {canonicalize_name(package.metadata["Name"]) for package in importlib.metadata.distributions()}
        if name in constraints and name not in FLOATING
    }
    assert len(needs) > 80
    assert [name for name, need in needs.items() if not all(f"{v}.0" in SpecifierSet(need) for v in PYTHONS)] == []


def test_conda_installs_the_same_packages_through_pip(conda):
    (pip,) = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-c constraints.txt", "-e .[dev]"]
    names = [entry.split()[0] for entry in conda["dependencies"] if isinstance(entry, str)]
    assert names == ["python", "pip"], "a package from conda would not be held to the pins"


def test_all_descriptions_name_the_same_pythons(project, conda):
    versions = [f"3.{minor}" for minor in range(8, 20)]
    (line,) = [entry for entry in conda["dependencies"] if str(entry).startswith("python ")]
    specifier = SpecifierSet(line.split(" ", 1)[1])
    assert [version for version in versions if version in specifier] == [*PYTHONS]
    assert next(version for version in versions if version in SpecifierSet(project["requires-python"])) == PYTHONS[0]
    image = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["image"]
    assert image.split(":")[1] in PYTHONS
    for name in ("bootstrap.py", "Makefile", "README.md"):
        assert f"{PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / name).read_text()


# --- the commands -----------------------------------------------------------------------------------


def make(*arguments, cwd=ROOT, **variables) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


def test_make_without_a_target_lists_the_targets():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    listed = re.findall(r"^make (\w+) +\S", make().stdout, flags=re.MULTILINE)
    assert listed[:3] == ["help", "lab", "doctor"]
    assert sorted(listed) == sorted(set(targets) - {"python"})


def test_targets_run_in_the_environment_of_bootstrap():
    assert "python3 bootstrap.py -m tests.run" in make("--dry-run", "test", "PYTHON=python3").stdout
    shown = make("--dry-run", "lab", "LAB_ARGS=--no-browser --port 9999", "PYTHON=python3").stdout
    assert "python3 bootstrap.py -m jupyterlab" in shown and "--no-browser --port 9999" in shown
    assert "\nmy-python -m jupyterlab" in make("--dry-run", "lab", "COURSE_PYTHON=my-python").stdout


def test_only_the_site_and_all_tests_need_the_packages_of_the_site():
    shown = {
        target: make("--dry-run", *target.split()).stdout for target in ("lab", "quick", "test", "test ALL=1", "site")
    }
    assert {target for target, text in shown.items() if "COURSE_EXTRAS=site" in text} == {"test ALL=1", "site"}


def test_make_test_passes_on_its_arguments():
    chapter = make("--dry-run", "test", "CHAPTER=08").stdout.split("tests.run")[1]
    assert chapter.split() == ["--chapter", '"08"']
    assert make("--dry-run", "test", "ALL=1").stdout.split("tests.run")[1].split() == ["--all"]
    assert "tests.run lint unit" in make("--dry-run", "test", "PHASES=lint unit").stdout
    assert "--last-failed" in make("--dry-run", "test", "LAST_FAILED=1").stdout
    assert "--" not in make("--dry-run", "test").stdout.split("tests.run")[1]


def test_make_lab_opens_the_start_page_only_where_it_exists(tmp_path):
    """JupyterLab exits with an error when it is told to open a file that does not exist."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    assert "START_HERE.md" not in make("--dry-run", "lab", cwd=tmp_path).stdout
    (tmp_path / "START_HERE.md").touch()
    assert make("--dry-run", "lab", cwd=tmp_path).stdout.rstrip().endswith(" START_HERE.md")


def test_make_clean_keeps_an_environment_elsewhere_and_grades_because_they_hold_decisions_by_hand(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for folder in (".venv", "course/shared/__pycache__", "elsewhere", "build/grades", "build/release"):
        (tmp_path / folder).mkdir(parents=True)
    overrides = tmp_path / "build" / "grades" / "overrides.csv"
    overrides.touch()
    assert make("clean", cwd=tmp_path, COURSE_VENV="elsewhere").returncode == 0
    kept = {"Makefile", "course", "shared", "elsewhere"}
    assert {path.name for path in tmp_path.rglob("*")} == kept | {"build", "grades", "overrides.csv"}
    overrides.unlink()
    overrides.parent.rmdir()
    (tmp_path / "build" / "release").mkdir()
    assert make("clean", cwd=tmp_path, COURSE_VENV="elsewhere").returncode == 0
    assert {path.name for path in tmp_path.rglob("*")} == kept


def test_without_python_make_says_which_one_it_needs():
    failed = make("lab", "PYTHON=no-such-python")
    assert failed.returncode == 2 and failed.stdout == (
        "The course needs Python 3.11 to 3.14, but there is no no-such-python here.\n"
    )


# --- bootstrap.py -----------------------------------------------------------------------------------

FAKE_PYTHON = f"""#!/bin/sh
case "$2" in
venv) [ -z "$NO_VENV" ] && mkdir -p "$3/bin" "$3/lib/python3.11/site-packages" && cp "$0" "$3/bin/python" ;;
pip) [ "$3" = config ] && {{ echo "$PIP_CONFIGURED"; exit; }}
  echo "$*" >> "$PIP_LOG"; sleep ${{PIP_SECONDS:-0}}; exit ${{PIP_CODE:-0}} ;;
*) [ "$1" != -Ic ] || exec sleep ${{CPU_INDEX_SECONDS:-none}}  # asks for the index of CPU builds
  exec {sys.executable} "$@" ;;
esac
"""
PRINT = ("-c", "print('ran')")


class Clone:
    """A clone of the course that shares its environment's folder with its siblings."""

    def __init__(self, folder: Path, name: str, pins: str = "torch==1\n"):
        self.root, self.venv, self.log = folder / name, folder / "venv", folder / "pip.log"
        (self.root / "shared" / "checks").mkdir(parents=True)
        shutil.copy(BOOTSTRAP, self.root)
        (self.root / "constraints.txt").write_text(pins)
        (self.root / "constraints-gpu.txt").write_text("# with a GPU\ntorch==1.5\n")
        (self.root / "pyproject.toml").write_text(
            '[project]\ndependencies = ["torch"]\noptional-dependencies.dev = ["ruff"]\n'
        )
        self.tools = folder / "tools"
        self.tools.mkdir(exist_ok=True)
        self.nvidia_smi("exit 9")
        self.fake = folder / "fake_python"
        self.fake.write_text(FAKE_PYTHON)
        self.fake.chmod(0o755)

    def nvidia_smi(self, script: str) -> None:
        """Replace `nvidia-smi` by a shell script."""
        path = self.tools / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @property
    def pins(self) -> list[str]:
        """Return the pins that pip was given last."""
        return (self.venv / "constraints.txt").read_text().splitlines()

    def start(self, *command: str, before: str = "", stdin=subprocess.DEVNULL, **variables) -> subprocess.Popen:
        """Start bootstrap.py. `before` is Python that runs first, in the same process."""
        script = self.root / "bootstrap.py"
        code = f"""
import runpy, sys
sys._base_executable = {str(self.fake)!r}
sys.argv = [{str(script)!r}, *sys.argv[1:]]
{before}
runpy.run_path({str(script)!r}, run_name="__main__")
"""
        environment = os.environ | {"COURSE_VENV": str(self.venv), "PIP_LOG": str(self.log)}
        environment |= {"COURSE_TORCH": "", "COURSE_EXTRAS": ""}
        environment |= {"PATH": f"{self.tools}:{environment['PATH']}"} | variables
        return subprocess.Popen(
            [sys.executable, "-c", code, *command],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **options) -> tuple[int, str, str]:
        """Run bootstrap.py. Returns its exit code, what it printed and what it printed as an error."""
        process = self.start(*command, **options)
        printed, errors = process.communicate(timeout=scaled(60))
        return process.returncode, printed, errors

    def error(self, **options) -> str:
        """Run bootstrap.py where it must fail. Returns its message, which is one line."""
        code, _, errors = self.run(*PRINT, **options)
        assert code == 1
        assert re.fullmatch(r"[^\n]+\.\n", errors), errors
        return errors.strip()

    @property
    def installs(self) -> int:
        """Return how often pip was run for the environment."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path, "course")


def test_the_second_run_has_nothing_to_do(clone):
    code, printed, errors = clone.run(*PRINT)
    assert (code, printed.splitlines()[-1], errors) == (0, "ran", "")
    assert clone.run(*PRINT) == (0, "ran\n", "")
    assert clone.installs == 1
    assert clone.run()[1].startswith("The environment is ready: ")


@pytest.mark.parametrize("variables", [{}, {"COURSE_STUDENT": "1"}], ids=["no tests", "a student"])
def test_tools_are_added_where_there_are_tests_unless_for_a_student(clone, variables):
    tests = clone.root / "tests"
    if variables:
        tests.mkdir()
    clone.run(*PRINT, **variables)
    assert clone.log.read_text().rstrip().endswith(" torch")
    (clone.venv / "left_over").touch()
    tests.mkdir(exist_ok=True)
    assert "Adding tools" in clone.run(*PRINT)[1]
    assert clone.log.read_text().rstrip().endswith(" torch ruff") and (clone.venv / "left_over").exists()
    if not variables:
        tests.rmdir()
    clone.run(*PRINT, **variables)
    assert clone.installs == 2, "the tools may stay"


def test_extras_are_installed_on_request_and_then_kept(clone):
    with (clone.root / "pyproject.toml").open("a") as project:
        project.write('optional-dependencies.site = ["sphinx"]\n')
    clone.run(*PRINT)
    assert clone.log.read_text().rstrip().endswith(" torch")
    clone.run(*PRINT, COURSE_EXTRAS="site unknown")
    assert clone.log.read_text().rstrip().endswith(" torch sphinx")
    clone.run(*PRINT)
    assert clone.installs == 2, "the extra may stay"


@pytest.mark.parametrize("change", ["pins", "packages", "Python is gone", "folder"])
def test_an_environment_that_does_not_fit_is_rebuilt(clone, change):
    clone.run(*PRINT)
    (clone.venv / "left_over").touch()
    if change == "pins":
        (clone.root / "constraints.txt").write_text("torch==2\n")
    elif change == "packages":
        (clone.root / "pyproject.toml").write_text('[project]\ndependencies=["a"]\noptional-dependencies.dev=[]\n')
    elif change == "Python is gone":
        (clone.venv / "bin" / "python").unlink()
    else:  # its scripts contain the path
        clone.venv = clone.venv.rename(clone.venv.with_name("moved"))
    assert clone.run(*PRINT)[1].endswith("\nran\n")
    assert clone.installs == 2 and not (clone.venv / "left_over").exists()
    assert clone.run(*PRINT)[1] == "ran\n"


def test_an_unfinished_environment_is_never_used(clone):
    """pip failed, or bootstrap.py was killed while pip ran."""
    assert "pip failed for the reason above: check the network and the free disk space" in clone.error(PIP_CODE="1")
    assert clone.run(*PRINT)[1].endswith("\nran\n")
    (clone.root / "constraints.txt").write_text("torch==2\n")
    killed = clone.start(*PRINT, PIP_SECONDS="2")
    while clone.installs < 3:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    code, printed, _ = clone.run(*PRINT)
    assert code == 0 and "Waiting for another setup" in printed, "its pip is still running"
    assert clone.installs == 4


def test_of_two_setups_one_builds_and_the_other_waits(clone):
    both = [clone.start(*PRINT, PIP_SECONDS="1") for _ in range(2)]
    printed = [process.communicate(timeout=scaled(60))[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert clone.installs == 1
    assert sum("Waiting for another setup" in text for text in printed) == 1
    assert all(text.endswith("ran\n") for text in printed)


def test_an_environment_in_use_is_not_rebuilt(clone):
    clone.run(*PRINT)
    user = clone.start("-c", "print('in use', flush=True); input()", stdin=subprocess.PIPE)
    assert user.stdout.readline() == "in use\n"
    assert clone.run(*PRINT)[1] == "ran\n", "several may use it"
    (clone.root / "constraints.txt").write_text("torch==2\n")
    assert "must be rebuilt but is in use: close JupyterLab, let tests end" in clone.error()
    assert clone.installs == 1
    user.communicate("")
    assert clone.run(*PRINT)[1].endswith("\nran\n")
    assert clone.installs == 2


def test_clones_with_the_same_pins_share_an_environment(clone, tmp_path):
    clone.run(*PRINT)
    other = Clone(tmp_path, "other")
    assert other.run(*PRINT) == (0, "ran\n", "")
    show = "import os; print(os.environ['PYTHONPATH'], os.environ['PATH'].split(':')[0])"
    assert other.run("-c", show)[1].split() == [str(other.root), str(other.venv / "bin")]


def test_a_clone_with_other_pins_does_not_change_the_environment(clone, tmp_path):
    clone.run(*PRINT)
    other = Clone(tmp_path, "other", pins="torch==2\n")
    assert f"has the packages of another clone, {clone.root}: set COURSE_VENV to another folder" in other.error()
    shutil.rmtree(clone.root)
    assert other.run(*PRINT)[1].endswith("\nran\n")


def test_a_folder_that_is_not_an_environment_is_never_erased(clone):
    clone.venv.mkdir()
    (clone.venv / "thesis.tex").touch()
    assert "was not made by this bootstrap.py: move it away" in clone.error()
    assert (clone.venv / "thesis.tex").exists()


def test_a_folder_that_cannot_hold_an_environment_gets_one_message(clone):
    read_only = "import os; os.access = lambda path, mode: False"
    fails = f"{read_only}; import pathlib; pathlib.Path.mkdir = lambda *_, **__: open('/no/such/folder')"
    assert clone.error(before=fails).endswith(
        "cannot be created or changed here: set COURSE_VENV to a folder of your own."
    )
    assert "rename the folder with a colon" in clone.error(COURSE_VENV=str(clone.venv / "a:b" / "venv"))
    assert clone.run(*PRINT)[0] == 0
    assert clone.run(*PRINT, before=read_only) == (0, "ran\n", "")  # A complete environment is only read.


def test_an_unsuitable_machine_gets_one_message(clone):
    ast.parse(BOOTSTRAP.read_text(), feature_version=(3, 6))
    old = {"before": "sys.version_info = (3, 10, 4)", "PATH": ""}
    assert clone.error(**old) == "The course needs Python 3.11 to 3.14, but this is 3.10: install one."
    assert "On Windows, run this in WSL" in clone.error(before="sys.modules['fcntl'] = None")
    assert "`sudo apt install python3-venv`" in clone.error(NO_VENV="1")
    (clone.root.parent / "file").touch()
    assert "is not finished (NotADirectoryError" in clone.error(COURSE_VENV=str(clone.root.parent / "file" / "venv"))


def test_an_old_python_hands_over_to_a_newer_one(clone, tmp_path):
    newer = tmp_path / "bin" / "python3.12"
    newer.parent.mkdir()
    newer.write_text('#!/bin/sh\necho "python3.12 $*"\n')
    newer.chmod(0o755)
    _, printed, _ = clone.run(*PRINT, before="sys.version_info = (3, 10, 4)", PATH=f"{newer.parent}:/usr/bin:/bin")
    assert printed == f"python3.12 {clone.root}/bootstrap.py {' '.join(PRINT)}\n"


GPU = 'echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"'


@pytest.mark.parametrize(
    ("nvidia_smi", "pins"),
    [
        (f'[ "$1" = -L ] && {GPU}', ["# tested", "torch==1.5", "torchaudio==1", "b==2"]),
        ('echo "No devices found."', ["# tested", "torch==1", "torchaudio==1", "b==2"]),
        (f"{GPU}; exit 15", ["# tested", "torch==1", "torchaudio==1", "b==2"]),
    ],
    ids=["GPU", "no GPU", "broken driver"],
)
def test_the_pins_are_those_for_this_machine(tmp_path, nvidia_smi, pins):
    clone = Clone(tmp_path, "course", pins="# tested\ntorch==1\ntorchaudio==1\nb==2\n")
    clone.nvidia_smi(nvidia_smi)
    clone.run(*PRINT)
    assert clone.pins == pins
    assert f"-c {clone.venv}/constraints.txt torch" in clone.log.read_text()


@pytest.mark.parametrize(
    ("nvidia_smi", "variables", "is_used"),
    [
        ("exit 9", {"CPU_INDEX_SECONDS": "0"}, True),
        (GPU, {"CPU_INDEX_SECONDS": "0"}, False),
        ("exit 9", {"CPU_INDEX_SECONDS": "60"}, False),
        ("exit 9", {"CPU_INDEX_SECONDS": "no number"}, False),
        ("exit 9", {"CPU_INDEX_SECONDS": "0", "PIP_CONFIGURED": ":env:.index-url='https://mirror'"}, False),
        ("exit 9", {"CPU_INDEX_SECONDS": "0", "PIP_CONFIGURED": "global.find-links='/wheels'"}, False),
    ],
    ids=["no GPU", "GPU", "silent index", "no network", "own index", "own wheels"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, there is only the CPU build")
def test_without_a_gpu_torch_comes_from_the_index_of_cpu_builds(clone, nvidia_smi, variables, is_used):
    clone.nvidia_smi(nvidia_smi)
    assert clone.run(*PRINT, **variables)[::2] == (0, "")
    option = " --extra-index-url https://download.pytorch.org/whl/cpu -c "
    assert (option in clone.log.read_text()) == is_used and clone.installs == 1


def test_without_nvidia_smi_there_is_no_gpu(clone):
    missing = "import subprocess\ndef no_such_file(*_, **__): raise FileNotFoundError\n"
    clone.run(*PRINT, before=f"{missing}subprocess.check_output = no_such_file")
    assert clone.pins == ["torch==1"]


def test_an_environment_with_either_pins_is_kept_by_machines_with_and_without_gpus(clone):
    for first, then in ((GPU, "exit 9"), ("exit 9", GPU)):
        clone.nvidia_smi(first)
        clone.run(*PRINT)
        clone.nvidia_smi(then)
        assert clone.run(*PRINT) == (0, "ran\n", "")
        shutil.rmtree(clone.venv)
    assert clone.installs == 2


def test_a_version_of_torch_can_be_chosen(clone):
    clone.run(*PRINT, COURSE_TORCH="1.5")
    assert clone.pins == ["torch==1.5"]
    assert clone.run(*PRINT, COURSE_TORCH="1.5") == (0, "ran\n", "")
    clone.nvidia_smi(GPU)
    clone.run(*PRINT, COURSE_TORCH="1")
    assert clone.pins == ["torch==1"] and clone.installs == 2
    assert clone.error(COURSE_TORCH="1.4") == "COURSE_TORCH must be 1 or 1.5, and is 1.4."
    assert clone.installs == 2


@pytest.mark.exhaustive
def test_the_real_environment_imports_the_clone_in_which_python_is_started(tmp_path):
    """Use the real venv and pip to install a package of one module."""
    wheel = tmp_path / "wheels" / "tiny_course_package-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_course_package.py", "")
        info = "tiny_course_package-1.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-course-package\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    maker, other = (Clone(tmp_path, name, pins="tiny-course-package==1\n") for name in ("maker", "other"))
    for clone in (maker, other):
        text = (clone.root / "pyproject.toml").read_text()
        (clone.root / "pyproject.toml").write_text(text.replace("torch", "tiny-course-package"))
        (clone.root / "shared" / "__init__.py").touch()
        (clone.root / "chapters").mkdir()
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheel.parent),
        "before": "sys._base_executable = sys.executable",
    }
    code, _, errors = maker.run(**offline)
    assert (code, errors) == (0, "")

    def imported(folder: Path, **variables) -> str:
        show = [maker.venv / "bin" / "python", "-c", "import shared, tiny_course_package; print(shared.__file__)"]
        environment = {"PATH": os.environ["PATH"]} | variables
        return subprocess.run(show, cwd=folder, env=environment, capture_output=True, text=True).stdout.strip()

    for folder, found in ((other.root / "chapters", other), (maker.root / "chapters", maker), (tmp_path, maker)):
        assert imported(folder) == f"{found.root}/shared/__init__.py"
    assert imported(maker.root / "chapters", PYTHONPATH=str(other.root)) == f"{other.root}/shared/__init__.py"
