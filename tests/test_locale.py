"""The instructor's commands do the same on a system whose locale is not UTF-8, and in a terminal that lacks characters.

Such a system is an older cluster with LC_ALL=en_US, or a container with LC_ALL=C. Python then reads files as ASCII,
unless each of them is opened with an encoding.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
TEXT = ascii("✓ José, प्रिया: 5 ≤ 6")
PRINT = f"from shared.checks.terminal import show_anything as s; s(); print({TEXT}); raise SystemExit({{}})"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | OLD | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="ascii")


def test_this_locale_is_not_utf_8():
    assert run("-c", "print(open(__import__('os').devnull).encoding)").stdout.lower() != "utf-8\n"


@pytest.mark.parametrize("status", [0, 1])
def test_what_a_terminal_lacks_is_replaced_and_the_exit_status_stays(status):
    done = run("-c", PRINT.format(status))
    assert (done.returncode, done.stdout) == (status, "? Jos?, ??????: 5 ? 6\n") and not done.stderr


@pytest.mark.parametrize("module", ["instructor.start_page", "instructor.glossary"])
def test_pages_are_the_same_in_every_locale(module):
    done = run("-m", module, "--check")
    assert done.returncode == 0 and "is up to date" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_bundle_is_the_same_in_every_locale(tmp_path):
    from instructor import release

    done = run("-m", "instructor.release", "00", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(tmp_path / "distributed-training-00").as_posix(): path.read_bytes()
               for path in (tmp_path / "distributed-training-00").rglob("*") if path.is_file()}  # fmt: skip
    assert written == release.bundle(0)


def test_a_file_is_checked_in_a_terminal_that_lacks_the_signs():
    done = run("-m", "shared.checks", "manual_ddp", "solutions/manual_ddp.py", "--seed", "1")
    assert done.returncode == 0 and done.stdout.startswith("?"), done.stderr


def test_a_notebook_given_to_the_checks_is_refused_in_one_sentence():
    done = run("-m", "shared.checks", "manual_ddp", "labs/02_manual_ddp_lab.ipynb")
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and "run its cells" in done.stdout
