"""Write the lessons and labs for Colab: `make colab`, or `python -m instructor.colab`.

Colab opens one notebook without the course beside it. So each copy in build/colab/ begins with a cell that fetches the
course from its public address and installs what Colab lacks.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import nbformat

from instructor.build import ROOT, chapters, lab_of

FOLDER = ROOT / "build" / "colab"
WORDS = (
    "This copy is for Colab. Run the next cell first: it fetches the course and installs what Colab lacks. To keep "
    "what you write, choose *File > Save a copy in Drive*."
)


def address() -> str:
    """Return where the course is published."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def for_colab(notebook: nbformat.NotebookNode, folder: str, fetched_from: str) -> nbformat.NotebookNode:
    """Put two cells before a lesson or a lab that is not executed: what this copy is, and how it gets the course."""
    there = f"~/{fetched_from.split('/')[-1]}"
    fetch = f"!test -d {there} || git clone --quiet --depth 1 {fetched_from} {there}"
    code = f"{fetch}\n%run {there}/shared/jupyter/colab.py {folder}"
    first = [nbformat.v4.new_markdown_cell(WORDS, id="colab-000"), nbformat.v4.new_code_cell(code, id="colab-001")]
    notebook.cells = [*first, *notebook.cells]
    return notebook


def write(folder: Path = FOLDER, fetched_from: str = "") -> list[Path]:
    """Write every lesson and lab into `folder`. Returns the files."""
    written = []
    for chapter in chapters():
        for kind, notebook in (("chapters", chapter.read("lesson")), ("labs", lab_of(chapter))):
            path = folder / kind / f"{chapter.name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(for_colab(notebook, kind, fetched_from or address()), path)
            written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.colab", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/colab")
    folder = parser.parse_args().folder
    print(f"{len(write(folder))} notebooks in {folder} fetch the course from {address()}.")
    print("In Colab, open one with File > Upload notebook.")
    if "/OWNER/" in address():
        print("OWNER is a placeholder: write the course's real address into pyproject.toml, then run this again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
