"""Write a course folder for nbgrader: `python -m instructor.grade.nbgrader_course DIR`.

Writes DIR/source/<lab>/<lab>.ipynb, each lab with its solutions marked, and DIR/nbgrader_config.py. In DIR, nbgrader's
generate_assignment, autograde and export then work as its documentation says. nbgrader runs students' code with your
own rights, and gives an exercise all of its points or none. `make grade` uses a sandbox and gives partial credit.
"""

import argparse
import sys
from pathlib import Path

import nbformat

from instructor.build import STUB, chapters
from shared.checks.terminal import show_anything
from shared.deadlines import scaled

CONFIG = f"""c = get_config()  # noqa: F821 (nbgrader defines it)
c.CourseDirectory.course_id = "distributed_training"
c.ClearSolutions.code_stub = {{"python": {STUB!r}}}
c.ExecutePreprocessor.timeout = {scaled(180):.0f}
"""


def write(folder: Path) -> list[Path]:
    """Write every lab's source, and the configuration if there is none yet. Returns the notebooks' paths."""
    written = []
    for chapter in chapters():
        path = folder / "source" / chapter.name / f"{chapter.name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(chapter.read("lab"), path)
        written.append(path)
    config = folder / "nbgrader_config.py"
    if not config.exists():
        config.write_text(CONFIG, encoding="utf-8")
    return written


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(
        prog="python -m instructor.grade.nbgrader_course", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where to write the course folder")
    written = write(parser.parse_args().folder)
    print(f"Wrote {len(written)} labs to {written[0].parent.parent}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
