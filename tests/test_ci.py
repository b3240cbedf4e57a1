"""What CI runs: `make test`, after what a new machine lacks was installed. No test here installs anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run_ci(tmp_path):
    """Run .ci/run from another folder, with fakes of all that it starts. → what they were told, the exit code"""

    def run(*installed: str, user: int = 0, apt_get_code: int = 0) -> tuple[list[str], int]:
        told = tmp_path / "told"
        fakes = {
            "make": f'echo "make $* in $PWD" >>{told}; exit 7',
            "apt-get": f'echo "apt-get $*" >>{told}; echo "from apt-get"; exit {apt_get_code}',
            "id": f"echo {user}",
            **{name: "exit 0" for name in installed},
        }
        for name, script in fakes.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        for name in ("bash", "dirname", "env"):
            (tmp_path / name).symlink_to(shutil.which(name))
        ran = subprocess.run([ROOT / ".ci" / "run"], cwd=tmp_path, capture_output=True, env={"PATH": str(tmp_path)})
        assert ran.stdout == b"", "what is printed is the tests' own"
        return told.read_text().splitlines(), ran.returncode

    return run


def test_ci_runs_make_test(run_ci):
    told, code = run_ci("chromium", "bwrap")
    assert told == [f"make test in {ROOT}"]
    assert code == 7, "a failed make test must fail CI"


@pytest.mark.parametrize(
    ("installed", "packages"), [((), "chromium bubblewrap"), (("chromium",), "bubblewrap"), (("bwrap",), "chromium")]
)
def test_ci_installs_what_a_new_machine_lacks(run_ci, installed, packages):
    told, _ = run_ci(*installed)
    assert told[:2] == ["apt-get update -q", f"apt-get install -q -y --no-install-recommends {packages}"]
    assert told[2:] == [f"make test in {ROOT}"]


def test_ci_goes_on_where_it_cannot_install(run_ci):
    told, _ = run_ci(apt_get_code=100)
    assert told == ["apt-get update -q", f"make test in {ROOT}"]


def test_ci_installs_nothing_for_one_who_may_not(run_ci):
    told, _ = run_ci(user=1000)
    assert told == [f"make test in {ROOT}"]
