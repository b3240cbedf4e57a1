"""Ranks start whatever lies beside the notebook, and whatever else prints while Python starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.deadlines import scaled
from shared.ranks import launchers

ROOT = Path(__file__).resolve().parent.parent
START = f"""
import contextlib, io, json, random, sys
sys.path.insert(0, {str(ROOT)!r})
from shared import ranks
with contextlib.redirect_stdout(io.StringIO()):
    ranks.start(2)
"""


def run_beside(folder: Path, program: str, **variables) -> str:
    """Run a program with ranks in a folder, as a notebook there would. Returns what it prints."""
    path = folder.parent / "program.py"  # not in the folder, because the kernel itself does not put it first either
    path.write_text(START + program)
    done = subprocess.run(
        [sys.executable, path],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "stringprep", "torch"])
def test_a_students_file_named_like_a_module_does_not_replace_it_while_ranks_start(tmp_path, name):
    beside = tmp_path / "labs"
    beside.mkdir()
    (beside / f"{name}.py").write_text("print('{')\nraise ImportError('this is the student’s file')\n")
    (beside / "my_helper.py").write_text("def answer():\n    return 42\n")
    program = """
def look():
    import os, my_helper
    return my_helper.answer(), os.getcwd()
print(json.dumps(ranks.run(look)))
"""
    assert json.loads(run_beside(beside, program)) == [[42, str(beside)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("printed", ["print('[1]', end='')", "import os; os.write(1, b'{}\\n7\\n')"])
def test_what_a_site_prints_while_python_starts_is_ignored(tmp_path, printed):
    (tmp_path / "labs").mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(printed)
    program = "print('\\n' + json.dumps(ranks.run(lambda: 1)))"
    assert run_beside(tmp_path / "labs", program, PYTHONPATH=str(site)).splitlines()[-1] == "[1, 1]"


def test_only_events_are_read():
    assert launchers._event_in(b'{"ended": 0, "pid": 13, "status": -9}\n') == {"ended": 0, "pid": 13, "status": -9}
    for line in (b"\n", b"Welcome\n", b"{\n", b"7\n", b"[1]\n", b"\xff\n"):
        assert launchers._event_in(line) == {}
