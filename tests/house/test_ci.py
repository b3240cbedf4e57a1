"""CI installs the programs that a new machine lacks, then runs `make test`. No test here installs anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RAN = f"make test ALL=1 in {ROOT}"


@pytest.fixture
def run_ci(tmp_path):
    """Run .ci/run from another folder with fake programs. Returns the commands that it ran and its exit code."""

    def run(*installed: str, user: int = 0, apt_get_code: int = 0) -> tuple[list[str], int]:
        log = tmp_path / "commands"
        fakes = {
            "make": f'echo "make $* in $PWD" >>{log}; exit 7',
            "apt-get": f'echo "apt-get $*" >>{log}; echo "from apt-get"; exit {apt_get_code}',
            "id": f"echo {user}",
            **{name: "exit 0" for name in installed},
        }
        for name, script in fakes.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        for name in ("bash", "dirname", "env"):
            (tmp_path / name).symlink_to(shutil.which(name))
        ran = subprocess.run([ROOT / ".ci" / "run"], cwd=tmp_path, capture_output=True, env={"PATH": str(tmp_path)})
        assert ran.stdout == b"", "only the tests may print"
        return log.read_text().splitlines(), ran.returncode

    return run


def test_ci_runs_make_test(run_ci):
    commands, code = run_ci("chromium", "bwrap")
    assert commands == [RAN]
    assert code == 7, "a failed make test must fail CI"


@pytest.mark.parametrize(
    ("installed", "packages"), [((), "chromium bubblewrap"), (("chromium",), "bubblewrap"), (("bwrap",), "chromium")]
)
def test_ci_installs_missing_programs(run_ci, installed, packages):
    commands, _ = run_ci(*installed)
    assert commands[:2] == ["apt-get update -q", f"apt-get install -q -y --no-install-recommends {packages}"]
    assert commands[2:] == [RAN]


def test_ci_continues_if_it_cannot_install(run_ci):
    commands, _ = run_ci(apt_get_code=100)
    assert commands == ["apt-get update -q", RAN]


def test_ci_installs_nothing_without_root(run_ci):
    commands, _ = run_ci(user=1000)
    assert commands == [RAN]
