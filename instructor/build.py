"""Build the notebooks: a lesson.py becomes a lesson; a lab.py becomes a lab, its solution and importable modules.

    python -m instructor.build            rebuild what has changed
    python -m instructor.build --check    list what is out of date; exit 1 if anything is
    python -m instructor.build --force 02_manual_ddp

jupytext reads the scripts, nbgrader's own preprocessors blank the lab, and nbclient executes the notebooks. Tags in the
source say what to do with a cell:

    export                 add it to solutions/<module>.py, or to another module of the lab   (module="flat");
                           `class Name(Name):` continues a class of an earlier cell
    given                  give it to the grader: an exercise that is not exported needs this cell
    exercise               blank its `### BEGIN SOLUTION` region in the lab   (grade_id="...")
    check                  grade it                                           (grade_id="...", points=3)
    nbval-ignore-output    do not compare its output in tests, because it differs from run to run
    raises-exception       let it fail, and show the error

JupyterLab folds the source of a cell that has `jupyter={"source_hidden": true}` beside its tags: given code that
students need not read.

The head of a script has these keys below `course:`

    module     the module that the lab builds; exported cells go into it by default
    minutes    how long the lab takes students; in a lesson, [a, b] replaces the computed minutes
    draft      true while the chapter may be incomplete   (only in lab.py)
"""

import argparse
import ast
import copy
import functools
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from instructor import answers, contents, folding
from instructor.links import GLOSSARY, with_links
from shared.checks.terminal import show_anything
from shared.deadlines import scaled
from shared.jupyter import KERNELSPEC, LANGUAGE_INFO

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = int(scaled(120))
STUB = 'raise NotImplementedError("your code here")'
_MAGIC = "%%ranks"
_BEGIN, _END = "### BEGIN SOLUTION", "### END SOLUTION"


@dataclass(frozen=True)
class Chapter:
    """A chapter: one folder of source/."""

    name: str  # "02_manual_ddp"

    @property
    def folder(self) -> Path:
        return ROOT / "source" / self.name

    @property
    def is_draft(self) -> bool:
        """Tell whether the chapter may still be incomplete. Students do not get a draft."""
        return self.source_of("lab").metadata["course"].get("draft", False)

    def source_of(self, script: str) -> nbformat.NotebookNode:
        """Return a script as jupytext reads it. All callers get the same object, so they must not change it."""
        return _parsed((self.folder / f"{script}.py").read_text(encoding="utf-8"))

    def read(self, script: str) -> nbformat.NotebookNode:
        """Read a script as a notebook with cell ids that do not change from build to build."""
        notebook = copy.deepcopy(self.source_of(script))
        course = notebook.metadata.get("course", {})
        about = {"course": {**course, "source": f"source/{self.name}/{script}.py"}}
        notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO, **about})
        for index, cell in enumerate(notebook.cells):
            cell.id = f"{script}-{index:03d}"
            cell.metadata.pop("slideshow", None)  # marks for `make slides`, which reads them from the source
            _add_grading(cell)
        return notebook


@functools.cache  # jupytext needs 0.05 s for a lab, and a bundle reads each lab several times.
def _parsed(script: str) -> nbformat.NotebookNode:
    return jupytext.reads(script, fmt="py:percent")


def chapters() -> list[Chapter]:
    return [Chapter(script.parent.name) for script in sorted((ROOT / "source").glob("*/lesson.py"))]


def _add_grading(cell) -> None:
    """Turn our short tags into nbgrader's metadata, so that nbgrader's own commands work on the files."""
    tags = cell.metadata.get("tags", [])
    kind = "exercise" if "exercise" in tags else "check" if "check" in tags else None
    if kind is None:
        return
    grade = {"schema_version": 3, "grade_id": cell.metadata.pop("grade_id"), "cell_type": cell.cell_type}
    if kind == "check":
        grade |= {"grade": True, "solution": False, "locked": True, "points": cell.metadata.pop("points")}
    else:
        grade |= {"grade": False, "solution": True, "locked": False}
    cell.metadata["nbgrader"] = grade | {"task": False}


def lesson_of(chapter: Chapter) -> nbformat.NotebookNode:
    """Return the lesson as a student gets it, not executed: what answers a prediction is out of sight."""
    return answers.hide_answers(_to_execute(chapter.read("lesson")))


def lab_of(chapter: Chapter) -> nbformat.NotebookNode:
    """Return the lab as a student gets it: nbgrader has blanked the solutions, and there are no outputs."""
    from nbconvert.exporters.exporter import ResourcesDict
    from nbgrader.preprocessors import ClearOutput, ClearSolutions, LockCells

    notebook = chapter.read("lab")
    clear = ClearSolutions(code_stub={"python": STUB})
    for preprocessor in (clear, LockCells(), ClearOutput()):
        notebook, _ = preprocessor.preprocess(notebook, ResourcesDict())
    exercises = [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]
    notebook.metadata["course"]["originals"] = {cell.id: cell.source for cell in exercises}
    return notebook


def solution_of(chapter: Chapter) -> nbformat.NotebookNode:
    """Return the lab with its solutions, not executed."""
    notebook = chapter.read("lab")
    for cell in notebook.cells:
        cell.source = _without_markers(cell.source)
    return _to_execute(notebook)


def module_names(chapter: Chapter) -> list[str]:
    """Name the modules that a lab exports, its own first."""
    notebook = chapter.source_of("lab")
    own = notebook.metadata["course"]["module"]
    exported = [cell for cell in notebook.cells if "export" in cell.metadata.get("tags", [])]
    return list(dict.fromkeys([own, *(cell.metadata.get("module", own) for cell in exported)]))


def modules_of(chapter: Chapter) -> dict[str, str]:
    """Return the code of the modules that a lab exports, by name, its own module first.

    The cells of a lab share one namespace. Its modules therefore import what they use from each other.
    """
    notebook = chapter.source_of("lab")
    own = notebook.metadata["course"]["module"]
    cells: dict[str, list[str]] = {own: []}
    for cell in notebook.cells:
        if "export" in cell.metadata.get("tags", []):
            source = _without_markers(cell.source.removeprefix(_MAGIC)).strip()
            cells.setdefault(cell.metadata.get("module", own), []).append(source)
    bodies = {name: "\n\n".join(_with_whole_classes(sources)) for name, sources in cells.items()}
    origin = f"# Built by `make notebooks` from source/{chapter.name}/lab.py: edit that, not this.\n"
    return {name: _formatted(origin + _with_imports(name, bodies)) for name in bodies}


def _with_whole_classes(sources: list[str]) -> list[str]:
    """Append each cell that continues a class, `class Name(Name):`, to that class.

    A lab splits a long class over several cells. In a notebook, each of them defines a subclass with the same name. The
    module has one class.
    """
    joined: list[str] = []
    for source in sources:
        tree = ast.parse(source).body
        continued = next((node for node in tree if isinstance(node, ast.ClassDef) and _continues(node)), None)
        if continued is None:
            joined.append(source)
            continue
        index, end = max(
            (index, node.end_lineno)
            for index, earlier in enumerate(joined)
            for node in ast.parse(earlier).body
            if isinstance(node, ast.ClassDef) and node.name == continued.name
        )
        lines, more = joined[index].splitlines(), source.splitlines()
        methods = more[continued.lineno : continued.end_lineno]
        rest = [*more[: continued.lineno - 1], *more[continued.end_lineno :]]
        joined[index] = "\n".join([*lines[:end], "", *methods, *lines[end:]])
        joined.append("\n".join(rest).strip())
    return [source for source in joined if source]


def _continues(node: ast.ClassDef) -> bool:
    return [ast.unparse(base) for base in node.bases] == [node.name]


def _with_imports(name: str, bodies: dict[str, str]) -> str:
    """Return a module's code with imports of everything that it uses from the other modules of its lab."""
    tree = ast.parse(bodies[name])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _defined_in(bodies[name])
    imports = [
        f"from solutions.{other} import {', '.join(sorted(found))}"
        for other, body in bodies.items()
        if other != name and (found := used & _defined_in(body))
    ]
    lines = bodies[name].splitlines()
    docstring_lines = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
    return "\n".join([*lines[:docstring_lines], *imports, *lines[docstring_lines:]])


def _defined_in(body: str) -> set[str]:
    tree = ast.parse(body)
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return named | {target.id for target in targets if isinstance(target, ast.Name)}


@functools.cache
def _formatted(source: str) -> str:
    """Return the source with sorted imports, formatted."""
    settings = [
        "--config",
        str(ROOT / "pyproject.toml"),
        "--stdin-filename",
        str(ROOT / "solutions" / "module.py"),
        "-",
    ]
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, *settings]
        source = subprocess.run(ruff, input=source, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    return source


def _without_markers(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if line.strip() not in (_BEGIN, _END))


def products(chapter: Chapter) -> dict[Path, tuple[str, Any]]:
    """Return everything that is built from a chapter: (kind, unexecuted content) by path."""
    modules = modules_of(chapter)
    names = {chapter.name for chapter in chapters()}

    def exists(path: str) -> bool:
        return path == GLOSSARY or contents.folder_of(Path(path)) in names

    def path_of(kind: str) -> Path:
        return ROOT / contents.notebook(kind, chapter.name)

    def linked(folder: str, notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
        return with_links(notebook, folder, chapter.name, exists)

    return {
        path_of("chapters"): ("executed", linked("chapters", lesson_of(chapter))),
        path_of("labs"): ("plain", linked("labs", lab_of(chapter))),
        **{ROOT / "solutions" / f"{module}.py": ("text", text) for module, text in modules.items()},
        path_of("solutions"): ("executed", linked("solutions", solution_of(chapter))),
    }


def is_current(path: Path, kind: str, content) -> bool:
    """Tell whether the file on disk has the source's cells in JupyterLab's form, and was executed if it should be."""
    return has_content(path, kind, content) and (
        kind == "text" or path.read_text(encoding="utf-8") == as_saved(_read(path))
    )


def _read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def has_content(path: Path, kind: str, content) -> bool:
    """Tell whether the file on disk has the source's cells, and was executed if it should be."""
    if not path.exists():
        return False
    if kind == "text":
        return path.read_text(encoding="utf-8") == content
    built = _read(path)
    if kind == "executed" and not _was_executed(built, content):
        return False
    return all(of(built) == of(content) for of in (_essences, folding.folded, _hidden_sources, _originals))


def _was_executed(built: nbformat.NotebookNode, content: nbformat.NotebookNode) -> bool:
    """Tell whether a built notebook has the outputs of this code. Its text may differ."""
    return built.metadata.get("course", {}).get("built_from") == content.metadata["course"]["built_from"]


def _originals(notebook: nbformat.NotebookNode) -> dict:
    """Return the sources of a lab's exercises by cell id. A failed check offers them."""
    return notebook.metadata.get("course", {}).get("originals", {})


def _essences(notebook: nbformat.NotebookNode) -> list[tuple]:
    return [
        (cell.cell_type, cell.id, cell.source, cell.metadata.get("tags", []), cell.metadata.get("nbgrader"))
        for cell in notebook.cells
    ]


def _hidden_sources(notebook: nbformat.NotebookNode) -> list[bool]:
    return [cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in notebook.cells]


def _to_execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Note the hash of the source's code. A notebook in which only text has changed keeps its outputs.

    It also keeps them if assertions only move to other cells, because those have no outputs.
    """
    notebook.metadata["course"]["built_from"] = _hash(notebook)
    return notebook


def _hash(notebook: nbformat.NotebookNode) -> str:
    """Return a hash of what is executed."""
    code = [(cell.source, cell.metadata.get("tags", [])) for cell in _code_cells(notebook)]
    return hashlib.sha256(repr(code).encode()).hexdigest()[:16]


def _code_cells(notebook: nbformat.NotebookNode) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run every cell in a fresh kernel. Raises an error if a cell fails that is not tagged raises-exception."""
    from nbclient import NotebookClient

    from shared.measure.claims import STRICT
    from shared.ranks import reader

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, STRICT: "1", reader.EXECUTOR: "1"})
    notebook.metadata.pop("widgets", None)  # Notebook viewers reject a file that has only half of the widgets' state.
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # This contains time stamps.
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _shows_progress(output)]
    return notebook


def _shows_progress(output) -> bool:
    """Tell whether an output is the progress bar of starting ranks. Its last update empties it, or comes too late."""
    text = output.get("data", {}).get("text/plain")
    return text is not None and (not text or re.fullmatch(r"starting \d+ ranks … \d+ ready", text) is not None)


def as_saved(notebook: nbformat.NotebookNode) -> str:
    """Return a notebook as the text that JupyterLab saves, so that opening and saving it changes nothing in git."""
    saved = folding.cover_answers(copy.deepcopy(notebook))
    for cell in _code_cells(saved):
        cell.execution_count = None  # A number beside a cell means that the student has run it.
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = None
    saved.metadata |= nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    return nbformat.writes(saved) + "\n"


def build(only: list[str], force: bool) -> None:
    """Rebuild what is out of date, modules first, because notebooks import them."""
    for chapter in chapters():
        if only and chapter.name not in only:
            continue
        for path, (kind, content) in sorted(products(chapter).items(), key=lambda item: item[1][0] != "text"):
            if is_current(path, kind, content) and not force:
                continue
            print(f"building {path.relative_to(ROOT)}", flush=True)
            if kind == "text":
                path.write_text(content, encoding="utf-8")
                continue
            if kind == "executed":
                content = _with_outputs(content, path, force)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_saved(content), encoding="utf-8")


def _with_outputs(content: nbformat.NotebookNode, path: Path, force: bool) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of the file at path, if the code is the same, or else of a new run."""
    built = _read(path) if path.exists() and not force else None
    if built is None or not _was_executed(built, content):
        return execute(content, path.parent)
    for cell, executed in zip(*map(_with_own_outputs, (content, built)), strict=True):
        cell.outputs = executed.outputs
    return content


def _with_own_outputs(notebook: nbformat.NotebookNode) -> list:
    return [cell for cell in _code_cells(notebook) if not cell.id.endswith(answers.MOVED)]


def stale() -> list[str]:
    """Name every built file that does not match its source."""
    return [
        str(path.relative_to(ROOT))
        for chapter in chapters()
        for path, (kind, content) in products(chapter).items()
        if not is_current(path, kind, content)
    ]


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(prog="python -m instructor.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapter", nargs="*", help="only these chapters, such as 02_manual_ddp")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if anything is out of date")
    parser.add_argument("--force", action="store_true", help="also rebuild what is up to date")
    options = parser.parse_args()
    if options.check:
        outdated = stale()
        print("\n".join(f"out of date: {path}" for path in outdated) or "Every built file matches its source.")
        return 1 if outdated else 0
    unknown = set(options.chapter) - {chapter.name for chapter in chapters()}
    if unknown:
        parser.error(f"there is no chapter {', '.join(sorted(unknown))}; the chapters are the folders of source/")
    build(options.chapter, options.force)
    return 0


if __name__ == "__main__":
    sys.exit(main())
