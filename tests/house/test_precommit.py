"""`pre-commit` runs the same checks as the lint phase of `make test`, and the course passes them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.runner import phases

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
HOOKS = [
    hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]
]


def test_the_hooks_run_the_commands_of_the_lint_phase():
    entries = [shlex.split(hook["entry"]) for hook in HOOKS]
    assert [entry[1:] for entry in entries if entry[0] == "python"] == [list(command[1:]) for command in phases.LINT]


def test_no_hook_is_downloaded():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert {hook["language"] for hook in HOOKS} == {"system"}
    missing = [hook["entry"] for hook in HOOKS if not (Path(sys.prefix) / "bin" / hook["entry"].split()[0]).exists()]
    assert not missing


@pytest.fixture
def repository(tmp_path) -> Path:
    """Copy the tracked files into another git repository, because some hooks change files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def hooks(repository: Path) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    home = str(repository / ".git" / "pre-commit")
    environment = {**os.environ, "PATH": path, "PRE_COMMIT_HOME": home}
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)


def test_the_course_passes_and_mistakes_fail(repository):
    """One run proves both: all that the hooks name are the two files with mistakes."""
    mistaken = {
        "shared/wire/clock.py": '"""A gradeint."""\nimport os\n',
        "README.md": "# Title  \nno newline at the end",
    }
    for name, text in mistaken.items():
        (repository / name).write_text(text)
    done = hooks(repository)
    failed = {line.split("..")[0] for line in done.stdout.splitlines() if line.endswith("Failed")}
    assert failed == {
        "lint", "layout of code", "spelling of prose", "one newline at the end", "no space at line ends"
    }, done.stdout  # fmt: skip
    listed = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"[\w./-]+", done.stdout)) & set(listed.split())
    assert named == set(mistaken), done.stdout
