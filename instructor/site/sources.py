"""Write the sources of the site's pages, and what can be downloaded."""

import re
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import nbformat

from instructor import colab, contents, glossary, start_page
from instructor.build import ROOT, Chapter, chapters
from instructor.links import GLOSSARY, titles
from instructor.site import figures
from instructor.site.addresses import Repository
from instructor.site.notebooks import Page, committed_text, resolved, row_of_links
from shared.tables import render

KINDS = ("chapters", "labs", "solutions")
DOCS = ("docs/running.md", "docs/cluster.md", "docs/wrappers.md", "docs/teaching.md", "docs/authoring.md")
_BAR = re.compile("`(█+)`")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def write(folder: Path, repository: Repository) -> None:
    """Write the pages' sources into folder/pages, and the files that the site contains besides into folder/files."""
    shutil.rmtree(folder, ignore_errors=True)
    finished = [chapter for chapter in chapters() if not chapter.is_draft]
    notebooks = {contents.notebook(kind, chapter.name): (kind, chapter.name) for kind in KINDS for chapter in finished}
    known = {"index.md", GLOSSARY, *DOCS, *notebooks}
    texts = {
        "index.md": start(finished, repository),
        GLOSSARY: terms(finished),
        **{page: prose(page, known.__contains__, repository) for page in DOCS},
    }
    for path, text in texts.items():
        _write(folder / "pages" / path, text)
    for path, (kind, name) in notebooks.items():
        page = Page(kind, name, known.__contains__, repository)
        _write(folder / "pages" / path, nbformat.writes(page.source()))
        target = folder / "files" / "notebooks" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(committed_text(path), encoding="utf-8")
    for name in figures.OFFERED:
        if widget := figures.offered(name):
            widget.write(folder / "files")
    (folder / "files" / ".nojekyll").touch()  # Without it, GitHub leaves out folders such as _static.
    if repository.is_known:
        colab.write(folder / "files" / "colab", repository.address)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def start(finished: list[Chapter], repository: Repository) -> str:
    """Return the start page, followed by the site's table of contents."""
    address = repository.address if repository.is_known else ""
    text = start_page.page(finished, exists=lambda path: True, is_site=True, address=address)
    text = _BAR.sub(_drawn_bar, text)
    text = _COMMENT.sub("", text)
    parts = groupby(finished, lambda chapter: _planned(chapter).part)
    trees = [_toctree(name, [f"chapters/{chapter.name}" for chapter in members]) for name, members in parts]
    trees.append(_toctree("Reference", [GLOSSARY, *DOCS]))
    return "\n".join([text, *trees])


def _drawn_bar(bar: re.Match) -> str:
    return render(__package__, "parts.html", part="memory bar", width_em=f"{0.7 * len(bar[1]):.1f}")


def _planned(chapter: Chapter) -> contents.Chapter:
    return next(entry for entry in contents.CHAPTERS.values() if entry.folder == chapter.name)


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def terms(finished: list[Chapter]) -> str:
    """Return the glossary. Each term gets an anchor, and the search finds it."""
    lines = [*_COMMENT.sub("", glossary.HEAD).splitlines(), "", "```{glossary}"]
    for term in glossary.glossary(finished):
        kind = f" ({term.kind})" if term.kind else ""
        lesson = f"[{titles()[term.chapter]}]({term.chapter}.ipynb)"
        lines += [f"{term.name}{kind}", f"  {term.definition} ({lesson})", ""]
    return "\n".join([*lines, "```", ""])


def prose(page: str, exists: Callable[[str], bool], repository: Repository) -> str:
    """Return a page of docs/."""
    text = resolved(_COMMENT.sub("", (ROOT / page).read_text(encoding="utf-8")), page, exists, repository)
    title, _, rest = text.partition("\n")
    edit = repository.edits(page)
    return f"{title}\n\n{row_of_links([f'[Edit this page]({edit})'])}\n{rest}" if edit else text
