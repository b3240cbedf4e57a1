"""Write the lessons and labs for Colab: `make colab`, or `python -m instructor.colab`.

Colab opens a notebook without the rest of the course. Each copy in build/colab/ therefore begins with a cell that
fetches the course from its public address and installs what Colab lacks.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import nbformat

from instructor import contents
from instructor.build import ROOT, chapters, lab_of, lesson_of
from shared.checks.terminal import show_anything

FOLDER = ROOT / "build" / "colab"
INTRODUCTION = (
    "This copy is for Colab. Run the next cell first: it fetches the course and installs what Colab lacks. To keep "
    "what you write, choose *File > Save a copy in Drive*."
)


def address() -> str:
    """Return the address at which the course is published."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def for_colab(notebook: nbformat.NotebookNode, folder: str, fetched_from: str) -> nbformat.NotebookNode:
    """Add two cells at the top of a notebook without outputs: an introduction, and code that fetches the course."""
    clone = f"~/{fetched_from.split('/')[-1]}"
    fetch = f"!test -d {clone} || git clone --quiet --depth 1 {fetched_from} {clone}"
    code = f"{fetch}\n%run {clone}/shared/jupyter/colab.py {folder}"
    first = [
        nbformat.v4.new_markdown_cell(INTRODUCTION, id="colab-000"),
        nbformat.v4.new_code_cell(code, id="colab-001"),
    ]
    notebook.cells = [*first, *notebook.cells]
    for cell in notebook.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["cellView"] = "form"  # Colab then shows no code until the student asks for it.
    return notebook


def write(folder: Path = FOLDER, fetched_from: str = "") -> list[Path]:
    """Write every lesson and lab into `folder`. Returns their paths."""
    written = []
    for chapter in chapters():
        for kind, notebook in (("chapters", lesson_of(chapter)), ("labs", lab_of(chapter))):
            path = folder / contents.notebook(kind, chapter.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(for_colab(notebook, kind, fetched_from or address()), path)
            written.append(path)
    return written


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(prog="python -m instructor.colab", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/colab")
    folder = parser.parse_args().folder
    print(f"Wrote {len(write(folder))} notebooks to {folder}. They fetch the course from {address()}.")
    print("To open one in Colab, choose File > Upload notebook.")
    if "/OWNER/" in address():
        print("OWNER is a placeholder. Put the course's real address into pyproject.toml, then run this again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
