"""What a student sees and keeps outside of notebooks: a bar per lab on START_HERE.md, and the page that finishes."""

import json
from pathlib import Path

from shared.progress.page import Page
from shared.tables import render

BARS = Path("build") / "progress"  # START_HERE.md shows BARS/04.svg beside lab 04
FINISHED = Path("mine") / "finished.html"


def write_bars(root: Path, page: Page) -> None:
    """Write a picture with the points of each lab. JupyterLab reads it again whenever START_HERE.md is opened."""
    (root / BARS).mkdir(parents=True, exist_ok=True)
    for lab in page.labs:
        points, of = page.points([lab])
        bar = render(__package__, "bar.svg", share=round(100 * points / of) if of else 0, points=points, of=of)
        (root / BARS / f"{lab.file[:2]}.svg").write_text(bar, encoding="utf-8")


def write_finished(root: Path, page: Page) -> Path | None:
    """Write the labs with a passed exercise as one HTML file. Returns its path, or None if no exercise has passed.

    Pictures come from the student's notebooks, which begin without any.
    """
    labs = [lab for lab in page.labs if page.passed(lab)]
    if not labs:
        return None
    rows = [
        {
            "lab": lab,
            "exercises": page.passed(lab),
            "points": page.points([lab]),
            "picture": _last_picture(root, lab.file),
        }
        for lab in labs
    ]
    passed = [exercise for row in rows for exercise in row["exercises"]]
    days = sorted({run.at[:10] for _, run, _ in passed})
    names = dict.fromkeys(exercise.name for exercise, _, _ in passed)
    html = render(
        __package__,
        "finished.html",
        rows=rows,
        numbers=_numbers(page),
        classes=[name for name in names if name[0].isupper()],
        first_day=days[0],
        last_day=days[-1],
    )
    (root / FINISHED).parent.mkdir(exist_ok=True)
    (root / FINISHED).write_text(html, encoding="utf-8")
    return root / FINISHED


def _numbers(page: Page) -> dict[str, str]:
    """Return what the top of the page says in numbers, by what they count."""
    exercises = [exercise for lab in page.labs for exercise in lab.exercises]
    passed = sum(len(page.passed(lab)) for lab in page.labs)
    tries = [run for run in page.runs if not run.saw_ours]
    return {
        "exercises passed": f"{passed} of {len(exercises)}",
        "points": "{:g} of {:g}".format(*page.points(page.labs)),
        "runs of checks": f"{len(tries)}",
        "days": f"{len({run.at[:10] for run in tries})}",
    }


def _last_picture(root: Path, lab: str) -> str:
    """Return the last figure among the saved outputs of a lab as base64, or ""."""
    found = ""
    for cell in json.loads((root / "labs" / lab).read_bytes())["cells"]:
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png", "")
            found = "".join(picture).replace("\n", "") or found
    return found
