"""A chapter's bundle has everything that it needs to run, no answers, and the same bytes every time."""

import ast
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from instructor import build, contents, release
from tests import links

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHAPTERS = {release.number_of(chapter): chapter for chapter in build.chapters() if not chapter.is_draft}


# Without the exhaustive tests, the bundles of the first, the middle and the last chapter stand for all.
SAMPLE = {min(CHAPTERS), sorted(CHAPTERS)[len(CHAPTERS) // 2], max(CHAPTERS)}
NUMBERS = [pytest.param(number, marks=[] if number in SAMPLE else pytest.mark.exhaustive) for number in CHAPTERS]


class Bundles(dict):
    """The files of each chapter's bundle, which is made when it is first needed."""

    def __missing__(self, number: int) -> dict[str, bytes]:
        self[number] = release.bundle(number)
        return self[number]


@pytest.fixture(scope="module")
def bundles() -> Bundles:
    return Bundles()


def tracked() -> set[str]:
    """Return the files that git tracks, or skip the test where there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this copy of the course has no repository")
    return {name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()}


def code_of(name: str, content: bytes) -> list[str]:
    """Return the Python code of a file, cell by cell, without cells that may fail."""
    if not name.endswith(".ipynb"):
        return [content.decode()]
    cells = [cell for cell in nbformat.reads(content.decode(), as_version=4).cells if cell.cell_type == "code"]
    sources = [cell.source for cell in cells if "raises-exception" not in cell.metadata.get("tags", [])]
    return [
        source.removeprefix("%%ranks")
        for source in sources
        if not source.startswith(("%%writefile", "!", "%")) or source.startswith("%%ranks\n")
    ]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_notebooks_of_a_bundle_link_to_its_glossary(bundles, number):
    notebooks = [content for name, content in bundles[number].items() if name.endswith(".ipynb")]
    assert notebooks and all(b"glossary.md" in content for content in notebooks)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_bundle_has_lessons_and_labs_up_to_its_chapter_and_earlier_solutions(bundles, number):
    names = set(bundles[number])
    for other, chapter in CHAPTERS.items():
        for folder, first in (("chapters", other), ("labs", other), ("solutions", other + 1)):
            assert (contents.notebook(folder, chapter.name) in names) == (number >= first)
    assert {"README.md", "Makefile", "shared/ranks/__init__.py", "shared/checks/engine/framework.py"} <= names
    assert any(name.startswith("shared/jupyter/") for name in names), "the Makefile uses it"
    assert not any(name.startswith(("source", "instructor")) for name in names)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_bundles_readme_describes_only_what_is_in_the_bundle(bundles, number):
    files = bundles[number]
    texts = {name: content.decode() for name, content in files.items() if name.endswith((".md", ".ipynb"))}
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    assert links.broken(texts, lambda target: target in files or target in folders) == []
    rows = [line for line in texts["README.md"].splitlines() if re.match(r"\| \d\d \|", line)]
    assert [int(row[2:4]) for row in rows] == [other for other in CHAPTERS if other <= number]
    assert "solutions/" not in rows[-1] and all("solutions/" in row for row in rows[:-1])
    table = [line for line in texts["README.md"].splitlines() if line.startswith("| ")]
    parts = [at for at, line in enumerate(table) if line.startswith("| | **")]
    assert parts and all(re.match(r"\| \d\d \|", table[at + 1]) for at in parts), "no part is empty"
    for word in ("course only", "git clone", "make test", "Colab", "Codespaces", "docs/teaching.md"):
        assert not any(word in texts[page] for page in release.PAGES), word
    assert "torchrun" not in texts["README.md"] + texts["docs/running.md"], "its scripts are not in a bundle"


def does_without(node: ast.AST) -> bool:
    """Whether the node is a `try` that goes on when an import in it fails."""
    return isinstance(node, ast.Try) and any(
        isinstance(handler.type, ast.Name) and handler.type.id == "ImportError" for handler in node.handlers
    )


OF_REGISTRY = {f"solutions/{name}.py" for name in ("strategies", "strategy", "course_strategies")}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_bundle_contains_every_solution_that_it_imports(bundles, number):
    files = bundles[number]
    for name, content in files.items():
        if name.startswith("shared/") or not name.endswith((".py", ".ipynb")):
            continue
        for code in code_of(name, content):
            tree = ast.parse(code)
            # The registry imports a strategy's module only when it builds the strategy.
            nodes = tree.body if name in OF_REGISTRY else ast.walk(tree)
            optional = {node for each in ast.walk(tree) if does_without(each) for node in ast.walk(each)}
            for node in nodes:
                module = (isinstance(node, ast.ImportFrom) and node not in optional and node.module) or ""
                if module.startswith("solutions."):
                    assert f"{module.replace('.', '/')}.py" in files, f"{name} needs {module}"


@pytest.mark.parametrize("number", [2, 3])
def test_a_bundle_contains_every_script_that_its_notebooks_name(bundles, number):
    text = "".join(content.decode() for name, content in bundles[number].items() if name.endswith(".ipynb"))
    named = set(re.findall(r"labs/\w+\.py", text))
    assert named and named <= set(bundles[number])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_bundle_has_all_of_shared_but_later_checks_and_nothing_of_instructor(bundles, number):
    shared = {name for name in tracked() if name.startswith("shared/")}
    given = {chapter.name for other, chapter in CHAPTERS.items() if other <= number}
    later = [chapter for chapter in build.chapters() if chapter.name not in given]  # and drafts
    without = tuple(f"shared/checks/{each.read('lab').metadata['course']['module']}/" for each in later)
    shared = {name for name in shared if not name.startswith(without)}
    assert {name for name in bundles[number] if name.startswith("shared/")} == shared
    assert not any(name.startswith("instructor/") for name in bundles[number])


def test_a_bundle_offers_only_commands_that_it_can_run(tmp_path, bundles):
    files = bundles[0]
    (tmp_path / "Makefile").write_bytes(files["Makefile"])
    offered = subprocess.run(["make", "help"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^make (\w+)", offered, re.MULTILINE) == ["help", "lab", "doctor", "finish", "clean"]
    text = files["Makefile"].decode()
    assert not re.search(r"instructor|benchmarks|tests|make test|make gpu", text)
    assert files["LICENSE"].startswith(b"MIT License")


@pytest.mark.parametrize("number", NUMBERS)
def test_no_bundle_contains_a_later_solution(bundles, number):
    """Look for complete solutions again, independently of release.leaks and regardless of indentation."""
    everything = "\n".join(
        line.strip()
        for name, content in bundles[number].items()
        if name.endswith((".py", ".ipynb"))
        for code in code_of(name, content)
        for line in code.splitlines()
    )
    to_come = [chapter for other, chapter in CHAPTERS.items() if other >= number]
    regions = [region for chapter in to_come for region in release.answers(chapter).values()]
    assert len(regions) > 2
    for region in regions:
        lines = [line.strip() for line in region.strip().splitlines()]
        assert len(lines) < 3 or "\n".join(lines) not in everything


def test_an_answer_is_found_in_any_file():
    exercise, answer = max(release.answers(CHAPTERS[4]).items(), key=lambda item: len(item[1]))
    moved = answer.replace("    ", "\t").replace("\n", "  # as in the lab\n\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1\n" + moved)])
    for name, text in (
        ("shared/plots/__init__.py", "def f():\n" + moved),
        ("chapters/00.ipynb", nbformat.writes(notebook)),
    ):
        assert release.leaks({name: text.encode()}, [CHAPTERS[4]]) == [
            f"{name} contains lines of {exercise} (04_overlap)"
        ]
        assert release.leaks({name: text.encode()}, [CHAPTERS[11]]) == []


@pytest.mark.exhaustive
def test_a_bundle_that_contains_an_answer_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "TOP", (*release.TOP, "solutions/overlapped_ddp.py"))
    with pytest.raises(release.ReleaseError, match=r"give answers away: solutions/overlapped_ddp\.py"):
        release.write(4, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_bundle_contains_a_draft(monkeypatch):
    monkeypatch.setattr(build.Chapter, "is_draft", property(lambda chapter: chapter == CHAPTERS[5]))
    with pytest.raises(release.ReleaseError, match=r"chapter 05 is a draft: source/05_scaling/lab\.py"):
        release.bundle(5)
    files = release.bundle(6)
    assert not [name for name in files if "scaling" in name and not name.startswith("shared/")]
    assert "05_scaling" not in files["README.md"].decode() and "04_overlap" in files["README.md"].decode()


@pytest.mark.exhaustive
def test_two_bundles_are_identical(tmp_path):
    first, second = (release.write(4, tmp_path / name).read_bytes() for name in ("one", "other"))
    assert first == second
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert archive.testzip() is None
        for name in archive.namelist():
            assert (tmp_path / "one" / name).read_bytes() == archive.read(name)
            assert Path(name).parts[0] == "distributed-training-04"


@pytest.mark.exhaustive
def test_a_bundles_lesson_and_lab_run_from_its_own_folder(tmp_path):
    """In chapter 02, the lesson runs to its end. The unsolved lab runs to its first check, which says what to do."""
    release.write(2, tmp_path)
    folder = tmp_path / "distributed-training-02"
    run = """
import nbformat, sys
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
for name in ("chapters/02_manual_ddp.ipynb", "labs/02_manual_ddp_lab.ipynb"):
    notebook = nbformat.read(name, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import shared; print(shared.__file__)"))
    try:
        NotebookClient(notebook).execute()
        print(name, notebook.cells[-1].outputs[0].text.strip())
    except CellExecutionError as failed:
        print(name, "stopped:", failed.evalue)
"""
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    lesson, lab = done.stdout.splitlines()[:2]
    assert lesson == f"chapters/02_manual_ddp.ipynb {folder}/shared/__init__.py", done.stderr
    assert lab.startswith("labs/02_manual_ddp_lab.ipynb stopped: Exercise 2.1, mean_over_ranks_: not written yet")


@pytest.mark.exhaustive
def test_a_bundle_can_be_installed(tmp_path):
    """setuptools finds all packages with their templates and texts, so pip can install them."""
    release.write(0, tmp_path)
    folder = tmp_path / "distributed-training-00"
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "--quiet", "build", "--build-lib=built"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    shared, built = (
        {p.relative_to(at / "shared") for p in (at / "shared").rglob("*.*")} for at in (folder, folder / "built")
    )
    assert {path for path in shared if path.suffix == ".html"} and built == shared


@pytest.mark.parametrize(
    ("chapter", "message"),
    [("77", "there is no chapter 77; the chapters are 00, 01"), ("last", "the chapter must be a number such as 04")],
)
def test_a_wrong_chapter_is_rejected_in_one_sentence(monkeypatch, capsys, chapter, message):
    monkeypatch.setattr(sys, "argv", ["release", chapter])
    with pytest.raises(SystemExit, match="2"):
        release.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_every_file_that_is_tracked_is_the_courses_own():
    folders = ("instructor", "shared", "source", "solutions", "chapters", "labs")
    expected = {name for name in tracked() if name.startswith(tuple(f"{folder}/" for folder in folders))}
    assert expected <= set(release.course_files(*folders)), "add the new ending to OWN_FILE"


LEFT_BEHIND = [".DS_Store", "._mine.py", ".mine.py.swp", "mine.py~", "#mine.py#", "mine.py.orig", "mine copy.py"]
LEFT_BEHIND += ["Thumbs.db", "mine.py.un~", "__pycache__/mine.pyc", ".ipynb_checkpoints/mine-checkpoint.py"]
LEFT_BEHIND += [".idea/workspace.json", "mine (1).py", "4913", "core.1234"]


def test_what_programs_leave_behind_and_links_are_not_the_courses(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    for name in ("mine.py", "data/a_b-c.json", *LEFT_BEHIND):
        (tmp_path / "shared" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shared" / name).write_bytes(b"\xff")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.py").write_text("")
    (tmp_path / "shared" / "link.py").symlink_to(tmp_path / "elsewhere" / "secret.py")
    (tmp_path / "shared" / "folder").symlink_to(tmp_path / "elsewhere")
    assert list(release.course_files("shared")) == ["shared/data/a_b-c.json", "shared/mine.py"]
