"""Write a chapter's bundle for students: `make release CHAPTER=04`, or `python -m instructor.release 04`.

The bundle is a folder and a zip in build/release/. It contains the lessons and labs up to the chapter, shared/, and the
solutions of earlier chapters, so everything in it runs. It contains no answers: if several consecutive lines of a later
solution are found in it, the bundle is not written. Two bundles of one commit are identical, bit for bit.
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

from instructor import contents, glossary, start_page
from instructor.build import ROOT, Chapter, chapters, module_names
from instructor.links import with_links
from shared.checks.terminal import show_anything

ENVIRONMENT = (
    *("Makefile", "bootstrap.py", "pyproject.toml"),
    *("constraints.txt", "constraints-gpu.txt", "environment.yml"),
)
PAGES = ("README.md", "docs/running.md", "docs/cluster.md", "docs/wrappers.md")
TOP = (*PAGES, "LICENSE", "AGENTS.md", "CLAUDE.md", "labs/AGENTS.md", *ENVIRONMENT)
# The first words of lines of these pages to leave out, besides their marked parts
COURSE_ONLY = ("git clone", "cd ", "make test", "| Colab", "| Codespaces", "| Docker")
PART = re.compile(r"\| \| \*\*")  # the row of README.md that begins a part of the course
OWN_FILE = re.compile(r"[\w-]+\.(css|gz|html|ipynb|js|json|md|npz|png|py|svg|toml|txt)(\.jinja)?")
WINDOW_LINES = 4  # This many consecutive lines of a solution are no coincidence.
FOLDER = ROOT / "build" / "release"
_TIME = (1980, 1, 1, 0, 0, 0)  # The earliest time in a zip. The current time would make every bundle different.


class ReleaseError(ValueError):
    """The bundle cannot be made; the message says why in one sentence."""


def number_of(chapter: Chapter) -> int:
    return int(chapter.name.split("_")[0])


def bundle(number: int) -> dict[str, bytes]:
    """Return the files of a chapter's bundle, by their path in it.

    Raises:
        ReleaseError: if there is no such chapter, if it is a draft, or if a file contains an answer.
    """
    drafts = {number_of(chapter): chapter for chapter in chapters() if chapter.is_draft}
    known = {number_of(chapter): chapter for chapter in chapters() if not chapter.is_draft}
    if number in drafts:
        raise ReleaseError(f"chapter {number:02d} is a draft: source/{drafts[number].name}/lab.py says `draft: true`")
    if number not in known:
        numbers = ", ".join(f"{finished:02d}" for finished in sorted(known))
        raise ReleaseError(f"there is no chapter {number:02d}; the chapters are {numbers}")
    files = {name: (ROOT / name).read_bytes() for name in TOP}
    for page in PAGES:
        files[page] = students_page(files[page].decode(), number, set(drafts)).encode()
    files["Makefile"] = students_makefile(files["Makefile"].decode()).encode()
    to_come = [chapter for chapter in chapters() if number_of(chapter) > number]
    later_checks = tuple(f"shared/checks/{module_names(chapter)[0]}/" for chapter in to_come)
    for name, path in course_files("docs/images", "shared").items():
        if not name.startswith(later_checks):
            files[name] = path.read_bytes()
    for other, chapter in sorted(known.items()):
        lesson, lab, solution = (contents.notebook(kind, chapter.name) for kind in ("chapters", "labs", "solutions"))
        if other <= number:
            files[lesson], files[lab] = (ROOT / lesson).read_bytes(), (ROOT / lab).read_bytes()
        if other < number:
            files[solution] = (ROOT / solution).read_bytes()
    given = [known[other] for other in sorted(known) if other <= number]
    files["chapters/glossary.md"] = glossary.page(given).encode()
    files |= _linked(files)
    files[start_page.PAGE.name] = start_page.page(given, exists=files.__contains__).encode()
    finished = [chapter for other, chapter in known.items() if other < number]
    files |= _modules(finished) | _scripts(given)
    found = leaks(files, [chapter for chapter in chapters() if chapter not in finished])
    if found:
        raise ReleaseError("the bundle would give answers away: " + "; ".join(found))
    return dict(sorted(files.items()))


def course_files(*folders: str) -> dict[str, Path]:
    """Return the course's own files in these folders, by their path in the course.

    Hidden files, copies, links, and what editors, systems and Python leave behind are not the course's.
    """
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            steps = [ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
            ours = OWN_FILE.fullmatch(path.name) and all(re.fullmatch(r"[\w-]+", name) for name in parts[:-1])
            if ours and path.is_file() and not any(step.is_symlink() for step in steps):
                found["/".join(parts)] = path
    return found


def _linked(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the notebooks of a bundle, with links only to notebooks that it contains."""
    found = {}
    for path, content in files.items():
        if path.endswith(".ipynb"):
            notebook = nbformat.reads(content.decode(), as_version=4)
            kind, name = Path(path).parent.name, contents.folder_of(Path(path))
            linked = with_links(notebook, kind, name, exists=files.__contains__)
            found[path] = (nbformat.writes(linked) + "\n").encode()
    return found


def students_page(text: str, number: int, drafts: set[int]) -> str:
    """Return a page without what a bundle lacks: the course's own parts, and later chapters and solutions."""
    text = re.sub(r"<!-- course only.*?<!-- /course only -->\n+", "", text, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        row = re.match(r"\| (\d\d)\b", line)
        if line.startswith(COURSE_ONLY) or (row and (int(row[1]) > number or int(row[1]) in drafts)):
            continue
        if lines and PART.match(lines[-1]) and not row:
            lines.pop()  # No chapter of this part is in the bundle.
        lines.append(re.sub(r"\[\d\d]\(solutions/[^)]*\)", "*later*", line) if row and int(row[1]) == number else line)
    return "\n".join(lines).rstrip() + "\n"


def students_makefile(text: str) -> str:
    """Return the Makefile without the targets whose code a bundle lacks, and without what is said about them."""
    targets = re.split(r"^(?=[a-z]+:.*## )", text, flags=re.MULTILINE)[1:]
    lacking = [target for target in targets if re.search(r"-m (instructor|tests|benchmarks)\b| update\.py", target)]
    names = [target.split(":")[0] for target in lacking]
    for target in lacking:
        text = text.replace(target, "")
    lines = text.splitlines()
    phony = next(line for line in lines if line.startswith(".PHONY"))
    text = text.replace(phony, " ".join(word for word in phony.split(" ") if word not in names))
    lines = [line for line in text.splitlines() if not re.match(rf"#   make ({'|'.join(names)}) ", line)]
    lines[0] = "# `make lab` opens the course. It creates .venv first if it is missing or out of date."
    return "\n".join(lines) + "\n"


def _modules(finished: list[Chapter]) -> dict[str, bytes]:
    """Return the modules of finished chapters, and the modules written by hand that import only these."""
    own = {f"{module}.py" for chapter in chapters() for module in module_names(chapter)}
    taken = {f"{module}.py" for chapter in finished for module in module_names(chapter)} | {"__init__.py"}
    waiting = {path.name for path in (ROOT / "solutions").glob("*.py")} - own - taken
    while ready := {name for name in waiting if _imports(name) <= taken}:
        taken |= ready
        waiting -= ready
    return {f"solutions/{name}": (ROOT / "solutions" / name).read_bytes() for name in taken}


def _scripts(given: list[Chapter]) -> dict[str, bytes]:
    """Return the scripts of labs/ that these chapters mention. They show no more than the chapters' lessons do."""
    notebooks = [contents.notebook(kind, chapter.name) for kind in ("chapters", "labs") for chapter in given]
    named = "\n".join((ROOT / notebook).read_text(encoding="utf-8") for notebook in notebooks)
    scripts = sorted((ROOT / "labs").glob("*.py"))
    return {f"labs/{path.name}": path.read_bytes() for path in scripts if f"labs/{path.name}" in named}


def _imports(name: str) -> set[str]:
    """Return the files of solutions/ that a module imports at its top level. Its functions may import others later."""
    tree = ast.parse((ROOT / "solutions" / name).read_text(encoding="utf-8"))
    froms = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {f"{module.split('.')[1]}.py" for module in froms if module.startswith("solutions.")}


# -- answers


def leaks(files: dict[str, bytes], still_to_come: list[Chapter]) -> list[str]:
    """Name every file that contains several consecutive lines of a solution, and the exercise."""
    texts = {name: "\n" + "\n".join(_lines(_code(name, content))) + "\n" for name, content in files.items()}
    found = []
    for chapter in still_to_come:
        for exercise, solution in answers(chapter).items():
            lines = _lines(solution)
            size = min(WINDOW_LINES, len(lines))
            windows = ["\n" + "\n".join(lines[start : start + size]) + "\n" for start in range(len(lines) - size + 1)]
            telling = [window for window in windows if len(window) > 60]  # Anybody might write shorter ones.
            hits = (name for name, text in texts.items() if any(window in text for window in telling))
            found += [f"{name} contains lines of {exercise} ({chapter.name})" for name in hits]
    return found


@functools.cache
def answers(chapter: Chapter) -> dict[str, str]:
    """Return the solutions of a lab, by the grade_id of their exercise."""
    found = {}
    for cell in chapter.read("lab").cells:
        if "### BEGIN SOLUTION" in cell.source:
            regions = cell.source.split("### BEGIN SOLUTION")[1:]
            found[cell.metadata["nbgrader"]["grade_id"]] = "\n".join(r.split("### END SOLUTION")[0] for r in regions)
    return found


def _code(name: str, content: bytes) -> str:
    if not name.endswith(".ipynb"):
        return content.decode(errors="replace")
    cells = nbformat.reads(content.decode(), as_version=4).cells
    return "\n".join(cell.source for cell in cells)


def _lines(text: str) -> list[str]:
    return [line for raw in text.splitlines() if (line := raw.split("  #")[0].strip()) and not line.startswith("#")]


# -- on disk


def as_zip(files: dict[str, bytes], top: str = "", executable: tuple[str, ...] = ()) -> bytes:
    """Pack files into a zip, or into one folder of it. The same files always give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(f"{top}/{name}" if top else name, _TIME)
            mode = 0o755 if name in executable else 0o644
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, mode << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def write(number: int, folder: Path = FOLDER) -> Path:
    """Write a chapter's bundle as a folder and as a zip beside it. Returns the zip's path."""
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
    show_anything()
    parser = argparse.ArgumentParser(prog="python -m instructor.release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapter", help="the chapter's number, such as 04")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/release")
    options = parser.parse_args()
    if not options.chapter.isdigit():
        parser.error(f"the chapter must be a number such as 04, got {options.chapter!r}")
    try:
        packed = write(int(options.chapter), options.folder)
    except ReleaseError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"the bundle was not written ({error.strerror}: {error.filename or options.folder})")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    print(f"Wrote {packed} ({packed.stat().st_size / 1e6:.1f} MB, sha256 {digest}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
