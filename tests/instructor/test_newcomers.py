"""Colab and Codespaces, for students who have nothing installed.

Neither is tested on the service itself. These tests show that a notebook opened on its own, with nothing beside it,
fetches the course and runs, and that the configuration of Codespaces matches what `make lab` needs.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from instructor import build, release
from instructor import colab as copies
from shared.deadlines import scaled
from shared.jupyter import colab

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ADDRESS = copies.address()
NAME = ADDRESS.removeprefix("https://github.com/")  # OWNER/REPOSITORY
README = (ROOT / "README.md").read_text()
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())


# --- the address ------------------------------------------------------------------------------------


def test_all_repository_addresses_are_the_same():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == ADDRESS
    others = {"codespaces/badge"}
    assert set(re.findall(r"(?:github\.com/|codespaces\.new/)([\w-]+/[\w-]+)", README)) - others <= {NAME}


def test_the_readme_shows_how_to_clone_the_course():
    """While the course has no public address, the line says which one to use."""
    (cloned,) = re.findall(r"^git clone (\S+) distributed-training\b", README, re.MULTILINE)
    assert cloned == ("ADDRESS" if "/OWNER/" in ADDRESS else ADDRESS)
    assert "cd distributed-training\n" in README and "OWNER" not in README


def test_version_and_license_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert (ROOT / "LICENSE").read_text().startswith(f"{citation['license']} License")


# --- Colab ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> str:
    """Return the address of a git repository with a copy of this checkout."""
    folder = tmp_path_factory.mktemp("published")
    for name in ("bootstrap.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("shared", "solutions", "chapters", "labs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "--all"], [*author, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return f"file://{folder}"


def opened_alone(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook for Colab up to its first check, in an empty folder with an empty home."""
    notebook = nbformat.read(path, as_version=4)
    checks = [n for n, cell in enumerate(notebook.cells) if "check" in cell.metadata.get("tags", [])]
    notebook.cells = [
        *notebook.cells[: checks[0] + 1],
        nbformat.v4.new_code_cell("import shared; print(shared.__file__)"),
    ]
    home = folder / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    client = NotebookClient(
        notebook, timeout=int(scaled(120)), allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**environment, "HOME": str(home)})
    return notebook


@pytest.mark.exhaustive
def test_a_notebook_opened_alone_fetches_the_course_and_runs(published, tmp_path):
    copies.write(tmp_path / "colab", fetched_from=published)
    lab = opened_alone(tmp_path / "colab" / "labs" / "02_manual_ddp_lab.ipynb", tmp_path)
    fetched = tmp_path / "home" / published.split("/")[-1]
    bootstrap, check, module = (lab.cells[n].outputs for n in (1, -2, -1))
    assert bootstrap[0].text.startswith(f"The course is in {fetched}, with torch "), bootstrap
    assert check[-1].ename == "CheckFailed" and "it is not written yet" in str(check)
    assert module[0].text == f"{fetched}/shared/__init__.py\n"


def test_only_what_is_missing_is_installed_and_torch_stays(monkeypatch):
    installed = set(colab.MODULES.values()) - {"jinja2", "sklearn"}
    monkeypatch.setattr(colab.importlib.util, "find_spec", lambda module: module if module in installed else None)
    assert [pin.split("==")[0] for pin in colab.missing_pins()] == ["Jinja2", "scikit-learn"]
    assert all("==" in pin for pin in colab.missing_pins())


def test_the_packages_for_colab_are_declared(monkeypatch):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(colab.MODULES) <= set(declared)


def test_only_a_torch_older_than_tested_gives_a_warning(monkeypatch):
    for version, warns in (("2.10.0+cu128", True), ("2.11.0+cu128", False), ("2.13.0", False), ("3.0.1", False)):
        monkeypatch.setattr(colab.importlib.metadata, "version", lambda _, version=version: version)
        assert ("older than" in colab.torch_version_note()) == warns
    assert f"torch=={colab.TORCH_TESTED[1]}" in (ROOT / "constraints-gpu.txt").read_text().splitlines()


def test_a_package_that_cannot_be_installed_stops_with_an_error():
    with pytest.raises(SystemExit, match="pip could not install no-such-package==1"):
        colab.install(["no-such-package==1", "--no-index", "--find-links=/nowhere"])


# --- Codespaces -------------------------------------------------------------------------------------


def test_codespaces_first_commands_match_make_lab():
    shown = subprocess.run(["make", "--dry-run", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert any(line.startswith(f"{CONTAINER['postCreateCommand']} -m") for line in shown.splitlines())
    hint = subprocess.run(CONTAINER["postAttachCommand"], shell=True, capture_output=True, text=True, check=True).stdout
    targets = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in targets for target in re.findall(r"make (\w+)", hint)) and "make lab" in hint


def test_jupyterlab_listens_on_the_forwarded_port_and_allows_the_codespaces_origin():
    """A page from another origin than the server's gets a kernel only if that origin is allowed."""
    shell = 'set -- $LAB_ARGS; printf "%s\\n" "$@"'  # unquoted, as make does it
    environment = {**os.environ, **CONTAINER["containerEnv"]}
    arguments = subprocess.run(
        ["sh", "-c", shell], cwd=ROOT, env=environment, capture_output=True, text=True
    ).stdout.split()
    assert "--no-browser" in arguments
    assert [f"--port={port}" for port in CONTAINER["forwardPorts"]] == [
        argument for argument in arguments if argument.startswith("--port")
    ]
    (pattern,) = [argument.split("=", 1)[1] for argument in arguments if "allow_origin_pat" in argument]
    assert re.match(pattern, "https://a-name-8888.app.github.dev") and not re.match(pattern, "https://example.org")
    shown = subprocess.run(
        ["make", "--dry-run", "lab"], cwd=ROOT, env=environment, capture_output=True, text=True
    ).stdout
    assert CONTAINER["containerEnv"]["LAB_ARGS"] in shown


def test_vs_code_uses_the_virtual_environment():
    python = CONTAINER["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"


# --- coding assistants ------------------------------------------------------------------------------


def test_coding_assistants_find_the_rules_of_the_labs_from_the_root_and_in_a_bundle():
    """Most assistants read AGENTS.md. One reads CLAUDE.md, whose lines `@path` include other files."""
    assert "(labs/AGENTS.md)" in (ROOT / "AGENTS.md").read_text()
    included = [line.removeprefix("@") for line in (ROOT / "CLAUDE.md").read_text().split()]
    assert included == ["AGENTS.md", "labs/AGENTS.md"]
    assert {*included, "CLAUDE.md"} <= set(release.TOP)
    stub = next(
        cell.source for cell in build.lab_of(build.chapters()[0]).cells if "exercise" in cell.metadata.get("tags", [])
    )
    (quoted,) = re.findall(r"`(raise .*)`", (ROOT / "labs" / "AGENTS.md").read_text())
    assert quoted in stub
