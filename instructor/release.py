"""What students get, chapter by chapter: `make release CHAPTER=04`, or `python -m instructor.release 04`.

A folder and a zip in build/release/ with the lessons and labs up to a chapter, shared/, and the solutions of the
chapters before. So everything in it runs, and nothing in it gives the current answers away: a bundle in which several
lines in a row of a solution still to come are found is not written. Two bundles of one commit are equal bit for bit.

A lesson may show what only the finished lab can do, in cells tagged `needs-solution`. In a bundle they keep the outputs
of the course's own run, and the lesson goes on behind them until the student has built the module.
"""

import argparse
import ast
import functools
import hashlib
import io
import re
import shutil
import sys
import zipfile
from pathlib import Path

import nbformat

from instructor.build import ROOT, Chapter, chapters, module_names

ENVIRONMENT = ("Makefile", "bootstrap.py", "pyproject.toml", "constraints.txt", "environment.yml")
TOP = ("README.md", "AGENTS.md", "CLAUDE.md", "labs/AGENTS.md", *ENVIRONMENT)
COURSES_OWN = ("make test", "| Colab", "| Codespaces")  # lines of README.md, beside the parts that are marked there
WINDOW_LINES = 4  # as many lines of a solution in a row are no coincidence
FOLDER = ROOT / "build" / "release"
_TIME = (1980, 1, 1, 0, 0, 0)  # a zip's first; the clock must not be in it


class ReleaseError(ValueError):
    """Why there can be no bundle, in one sentence."""


def number_of(chapter: Chapter) -> int:
    return int(chapter.name.split("_")[0])


def bundle(number: int) -> dict[str, bytes]:
    """→ the files of a chapter's bundle, by their path in it

    Raises: ReleaseError for a chapter that there is not, or where a file gives an answer away.
    """
    drafts = {number_of(chapter): chapter for chapter in chapters() if chapter.is_draft}
    known = {number_of(chapter): chapter for chapter in chapters() if not chapter.is_draft}
    if number in drafts:
        raise ReleaseError(f"chapter {number:02d} is a draft: source/{drafts[number].name}/lab.py says `draft: true`")
    if number not in known:
        raise ReleaseError(f"there is no chapter {number:02d}: {', '.join(f'{each:02d}' for each in sorted(known))}")
    files = {name: (ROOT / name).read_bytes() for name in TOP}
    files["README.md"] = students_readme(files["README.md"].decode(), number, set(drafts)).encode()
    for path in sorted((ROOT / "shared").rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    for each, chapter in sorted(known.items()):
        name = f"{chapter.name}.ipynb"
        if each <= number:
            files[f"chapters/{name}"] = _lesson(ROOT / "chapters" / name, finished=each < number)
            files[f"labs/{name}"] = (ROOT / "labs" / name).read_bytes()
        if each < number:
            files[f"solutions/{name}"] = (ROOT / "solutions" / name).read_bytes()
    finished = [chapter for each, chapter in known.items() if each < number]
    files |= _modules(finished) | _scripts(finished)
    found = leaks(files, [chapter for chapter in chapters() if chapter not in finished])
    if found:
        raise ReleaseError("the bundle would give answers away: " + "; ".join(found))
    return dict(sorted(files.items()))


def students_readme(text: str, number: int, drafts: set[int]) -> str:
    """README without what a bundle does not hold: the course's own parts, chapters and solutions still to come."""
    text = re.sub(r"<!-- course only.*?<!-- /course only -->\n+", "", text, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        row = re.match(r"\| (\d\d)\b", line)
        if line.startswith(COURSES_OWN) or (row and (int(row[1]) > number or int(row[1]) in drafts)):
            continue
        lines.append(re.sub(r"\[\d\d]\(solutions/[^)]*\)", "*later*", line) if row and int(row[1]) == number else line)
    return "\n".join(lines).rstrip() + "\n"


def _modules(finished: list[Chapter]) -> dict[str, bytes]:
    """The solutions' modules: those of finished chapters, and what needs nothing beyond them."""
    own = {f"{module}.py" for chapter in chapters() for module in module_names(chapter)}
    taken = {f"{module}.py" for chapter in finished for module in module_names(chapter)} | {"__init__.py"}
    waiting = {path.name for path in (ROOT / "solutions").glob("*.py")} - own - taken
    while ready := {name for name in waiting if _imports(name) <= taken}:
        taken |= ready
        waiting -= ready
    return {f"solutions/{name}": (ROOT / "solutions" / name).read_bytes() for name in taken}


def _scripts(finished: list[Chapter]) -> dict[str, bytes]:
    """Return the scripts of labs/ that a finished chapter names: each shows what the lab of that chapter asks for."""
    notebooks = [ROOT / folder / f"{chapter.name}.ipynb" for folder in ("chapters", "labs") for chapter in finished]
    named = "\n".join(path.read_text() for path in notebooks)
    scripts = sorted((ROOT / "labs").glob("*.py"))
    return {f"labs/{path.name}": path.read_bytes() for path in scripts if f"labs/{path.name}" in named}


def _imports(name: str) -> set[str]:
    """Return the files of solutions/ without which a module cannot be imported. Functions may import others later."""
    tree = ast.parse((ROOT / "solutions" / name).read_text())
    froms = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {f"{module.split('.')[1]}.py" for module in froms if module.startswith("solutions.")}


def _lesson(path: Path, finished: bool) -> bytes:
    """A lesson as built; while its lab is open, cells that need the solution may fail."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells if not finished else ():
        tags = cell.metadata.get("tags", [])
        if "needs-solution" in tags:
            cell.metadata["tags"] = [*tags, "raises-exception"]
            cell.source = "# Runs when you have built the lab's module. Below is what it gave.\n" + cell.source
    return (nbformat.writes(notebook) + "\n").encode()


# -- answers


def leaks(files: dict[str, bytes], still_to_come: list[Chapter]) -> list[str]:
    """→ file: exercise, for each solution of which a file has several lines in a row"""
    texts = {name: "\n" + "\n".join(_lines(_code(name, content))) + "\n" for name, content in files.items()}
    found = []
    for chapter in still_to_come:
        for exercise, solution in answers(chapter).items():
            lines = _lines(solution)
            size = min(WINDOW_LINES, len(lines))
            windows = ["\n" + "\n".join(lines[at : at + size]) + "\n" for at in range(len(lines) - size + 1)]
            telling = [window for window in windows if len(window) > 60]  # not what everybody would write
            hits = (name for name, text in texts.items() if any(window in text for window in telling))
            found += [f"{name} has lines of {chapter.name}: {exercise}" for name in hits]
    return found


@functools.cache
def answers(chapter: Chapter) -> dict[str, str]:
    """→ the solution regions of a lab, by the grade_id of their exercise"""
    found = {}
    for cell in chapter.read("lab").cells:
        if "### BEGIN SOLUTION" in cell.source:
            regions = cell.source.split("### BEGIN SOLUTION")[1:]
            found[cell.metadata["nbgrader"]["grade_id"]] = "\n".join(r.split("### END SOLUTION")[0] for r in regions)
    return found


def _code(name: str, content: bytes) -> str:
    if not name.endswith(".ipynb"):
        return content.decode()
    cells = nbformat.reads(content.decode(), as_version=4).cells
    return "\n".join(cell.source for cell in cells)


def _lines(text: str) -> list[str]:
    return [line for each in text.splitlines() if (line := each.split("  #")[0].strip()) and not line.startswith("#")]


# -- on disk


def as_zip(files: dict[str, bytes], top: str) -> bytes:
    """Pack files into one folder of a zip, the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(f"{top}/{name}", _TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def write(number: int, folder: Path = FOLDER) -> Path:
    """Write a chapter's bundle as a folder and as a zip beside it. → the zip"""
    files, top = bundle(number), f"distributed-training-{number:02d}"
    shutil.rmtree(folder / top, ignore_errors=True)
    for name, content in files.items():
        path = folder / top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    packed = folder / f"{top}.zip"
    packed.write_bytes(as_zip(files, top))
    return packed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.release", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", help="its number, 04 for one")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/release")
    options = parser.parse_args()
    if not options.chapter.isdigit():
        parser.error(f"a chapter is a number, as 04, got {options.chapter!r}")
    try:
        packed = write(int(options.chapter), options.folder)
    except ReleaseError as error:
        parser.error(str(error))
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
