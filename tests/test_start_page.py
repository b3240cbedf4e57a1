"""The page that `make lab` opens maps the chapters that a reader has, and its numbers are those of the benchmarks."""

import re
from pathlib import Path

import pytest

from benchmarks import stages
from instructor import build, contents, release, start_page
from tests import links

CHAPTERS = build.chapters()
FINISHED = [chapter for chapter in CHAPTERS if not chapter.is_draft]


@pytest.fixture(scope="module")
def page() -> str:
    return start_page.page(CHAPTERS, exists=lambda path: True)


def test_the_page_matches_the_chapters(page):
    assert start_page.PAGE.read_text() == page


def test_every_chapter_is_on_the_page_with_its_minutes_and_links(page):
    rows = [line for line in page.splitlines() if re.match(r"\| \d\d \| \[", line)]
    assert len(rows) == len(FINISHED)
    for row, chapter in zip(rows, FINISHED, strict=True):
        assert [link.split("/")[0] for link in links.links(row)] == ["chapters", "labs", "solutions"]
        assert all(contents.folder_of(Path(link)) == chapter.name for link in links.links(row))
        assert (
            f" | {start_page.lesson_minutes(chapter)} | " in row and f" | {start_page.lab_minutes(chapter)} | " in row
        )


def test_a_draft_is_still_to_come(page, monkeypatch):
    monkeypatch.setattr(build.Chapter, "is_draft", property(lambda chapter: chapter.name == "05_scaling"))
    drafted = start_page.page(CHAPTERS, exists=lambda path: True)
    assert "05_scaling" in page and "05_scaling" not in drafted
    assert re.search(r"^\*\*Still to come:\*\* Scaling, ", drafted, re.MULTILINE)


def test_a_course_of_drafts_has_a_page(monkeypatch):
    monkeypatch.setattr(build.Chapter, "is_draft", True)
    assert "chapters/00" not in start_page.page(CHAPTERS, exists=lambda path: True)


def test_a_bundles_page_shows_only_what_is_in_the_bundle():
    files = release.bundle(1)
    page = files["START_HERE.md"].decode()
    assert links.broken({"START_HERE.md": page}, files.__contains__) == []
    assert "solutions/00_ranks_solution.ipynb" in page and "labs/01_collectives_lab.ipynb" in page
    assert "solutions/01_collectives_solution.ipynb" not in page and "02_manual_ddp" not in page
    assert re.search(r"^\*\*Still to come:\*\* Data parallelism by hand, ", page, re.MULTILINE)


def test_no_link_of_the_page_is_broken(page):
    assert links.broken({"START_HERE.md": page}, lambda path: (build.ROOT / path).exists()) == []


def test_the_memory_on_the_page_is_what_the_formulas_predict(page):
    """tests/test_stages.py compares these predictions with measurements."""
    shown = [int(number) for number in re.findall(r"█` (\d+) MB", page)]
    predicted = [stages.predicted(stage).held_mb for stage in range(4)]
    assert shown == [round(sum(held[part] for part in stages.STATE)) for held in predicted]
    assert f"{predicted[3]['gathered']:.0f} MB of parameters that it gathers" in page


def test_the_times_on_the_page_are_those_of_the_benchmark(page):
    ratios = start_page.step_ratios()
    assert re.findall(r"(\d\.\d\d) times as long", page) == [ratios["ManualDDP"], ratios["OverlappedDDP"]]
    assert float(ratios["OverlappedDDP"]) < float(ratios["ManualDDP"])


def test_the_command_writes_the_page_only_when_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(start_page, "PAGE", tmp_path / "START_HERE.md")
    monkeypatch.setattr("sys.argv", ["start_page", "--check"])
    assert start_page.main() == 1 and not start_page.PAGE.exists()
    monkeypatch.setattr("sys.argv", ["start_page"])
    assert start_page.main() == 0 and start_page.PAGE.exists()
    monkeypatch.setattr("sys.argv", ["start_page", "--check"])
    assert start_page.main() == 0
