"""Write slides for a lesson into build/slides/: `make slides CHAPTER=04`, or `python -m instructor.slides 04`.

nbconvert makes reveal.js slides from the built lesson. Its source marks the cells: `slideshow={"slide_type": "slide"}`
begins a slide, and "-" continues it. A slide shows the heading of its section, the first sentences of its text, and its
figures; the speaker's notes (key S) have the whole text. pip fetches a package that contains reveal.js, so slides need
no network.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import nbformat

from instructor import answers, contents, folding
from instructor.build import ROOT, Chapter, chapters
from shared.checks.terminal import show_anything

FOLDER = ROOT / "build" / "slides"
TEMPLATES = Path(__file__).parent / "templates" / "slides"
REVEAL = "reveal.js"  # a folder beside the slides
CDN = "https://unpkg.com/reveal.js@5.2.1"
_PACKAGE, _INSIDE = "sphinx-revealjs==3.2.1", "sphinx_revealjs/_static/revealjs/"  # it contains reveal.js
MAX_WORDS = {True: 45, False: 100}  # of text, on a slide with a figure and on one without
MIN_WORDS = 20
_ABOUT_THE_NOTEBOOK = re.compile(r"\b(next|these) cells?\b|\bin the (next )?figure\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.?!:])\s+(?=[A-Z*`])")
_MATH = re.compile(r"(?<![\\$])(\$\$?)([^$]+)\1")


def marks(chapter: Chapter) -> list[str]:
    """Return, for each cell of a lesson's source, "slide", "-" or "" if it is on no slide."""
    cells = chapter.source_of("lesson").cells
    return [cell.metadata.get("slideshow", {}).get("slide_type", "") for cell in cells]


def slides(chapter: Chapter) -> nbformat.NotebookNode:
    """Return the marked cells of a built lesson, cut to what fits on slides."""
    built = nbformat.read(ROOT / contents.notebook("chapters", chapter.name), as_version=4)
    by_id, found = {cell.id: cell for cell in built.cells}, marks(chapter)
    title, section, cells = contents.CHAPTERS[int(chapter.name[:2])].title, "", []
    built.metadata["title"] = f"{chapter.name[:2]} · {title}"
    for index, mark in enumerate(found):
        cell = by_id[f"lesson-{index:03d}"]
        cell.source = answers.in_the_open(cell.source)
        parts = [("", cell.source)]
        if cell.cell_type == "markdown":
            split = re.split(r"^##? (.+)$", cell.source, flags=re.MULTILINE)
            parts = [part for part in zip(["", *split[1::2]], split[::2], strict=True) if any(map(str.strip, part))]
        # A cell that begins a slide shows its recap or its first section, and another one what comes before a heading.
        own = max(parts, key=lambda part: mark == "slide" and (part[0] == "Recap") + (part[0] != ""))
        if mark == "slide":
            cells.append(_markdown(f"## {own[0] or section}", "slide"))
        if mark and cell.cell_type == "markdown":
            figure = mark == "-" or next(filter(None, found[index + 1 :]), "") == "-"
            cells += [_markdown(shortened(own[1], MAX_WORDS[figure]), "-"), _markdown(_mathml(own[1]), "notes")]
        elif mark:
            cell.outputs = [output for output in cell.outputs if not folding.is_cover(output)]
            figures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
            cell.outputs = figures or cell.outputs
            cell.metadata = nbformat.from_dict({"slideshow": {"slide_type": "-"}})
            cells.append(cell)
        section = parts[-1][0] or section
    built.cells = [_markdown(f"# {built.metadata['title']}", "slide"), *cells]
    return built


def shortened(text: str, max_words: int) -> str:
    """Return the sentences of a Markdown text that fit on a slide, and its tables and lists if there is no figure."""
    kept, words = [], 0
    for paragraph in re.split(r"\*\*Terms\*\*|\*\*Predict\.\*\*", text)[0].strip().split("\n\n"):
        is_whole = paragraph.startswith(("|", "-"))
        if is_whole and max_words < MAX_WORDS[False]:
            break
        sentences = [paragraph] if is_whole else _SENTENCE.split(paragraph)
        fitting = []
        for sentence in sentences:
            words += 0 if is_whole else len(sentence.split())
            if words > max_words and words - len(sentence.split()) >= MIN_WORDS:
                break
            if not _ABOUT_THE_NOTEBOOK.search(sentence):
                fitting.append(sentence)
        kept.append(" ".join(fitting))
    kept = [paragraph for paragraph in kept if paragraph]
    if kept and kept[-1].endswith(":"):
        kept[-1] = " ".join(_SENTENCE.split(kept[-1])[:-1])
    return _mathml("\n\n".join(kept))


def _mathml(text: str) -> str:
    """Replace formulas by MathML, which browsers show without a library, and links to notebooks by their words."""
    from latex2mathml.converter import convert

    text = re.sub(r"\[([^]]+)]\((?!https?:)[^)]+\)", r"\1", text)
    return _MATH.sub(lambda found: convert(found[2], display="inline" if found[1] == "$" else "block"), text)


def _markdown(text: str, kind: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": kind}})


def fetch_reveal(folder: Path) -> bool:
    """Put reveal.js into a folder, from a package that pip downloads. Returns whether it is there."""
    if (folder / REVEAL).exists():
        return True
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", place]
        subprocess.run([*pip, _PACKAGE], capture_output=True, check=False)
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place, [name for name in archive.namelist() if name.startswith(_INSIDE)])
            shutil.copytree(Path(place) / _INSIDE, folder / REVEAL)
    return (folder / REVEAL).exists()


def write(chapter: Chapter, folder: Path = FOLDER) -> Path:
    """Write the slides of a chapter. Without reveal.js in the folder, they load it from the network."""
    from nbconvert import SlidesExporter

    exporter = SlidesExporter(
        template_file="slides.html.jinja",
        extra_template_paths=[str(TEMPLATES)],
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
        reveal_url_prefix=REVEAL if (folder / REVEAL).exists() else CDN,
        reveal_theme="white",
    )
    html, _ = exporter.from_notebook_node(slides(chapter))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{chapter.name}.html"
    path.write_text(html, encoding="utf-8")
    return path


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(prog="python -m instructor.slides", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapter", nargs="?", default="", help="such as 04; default: all chapters that have slides")
    wanted = parser.parse_args().chapter
    found = [chapter for chapter in chapters() if chapter.name.startswith(wanted) and any(marks(chapter))]
    if not found:
        names = ", ".join(chapter.name[:2] for chapter in chapters() if any(marks(chapter)))
        parser.error(f"there are no slides for chapter {wanted}; there are some for {names}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not fetch_reveal(FOLDER):
        print(f"pip could not download {_PACKAGE}, so the slides load reveal.js from {CDN} when you open them.")
    for chapter in found:
        print(write(chapter).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
