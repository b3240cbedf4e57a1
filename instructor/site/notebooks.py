"""Turn a built notebook into the source of a page. Nothing is executed: the page shows the stored outputs.

Pages show notebooks as they were committed, because whoever has used one finds their own code and runs in its file.
"""

import posixpath
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import nbformat

from instructor import contents, links
from instructor.build import ROOT
from instructor.site import figures
from instructor.site.addresses import Repository
from shared.tables import render


def committed_text(path: str) -> str:
    """Return a file of the course from the last commit, or as it is on disk if git has no commit of it."""
    shown = _git("show", f"HEAD:./{path}")
    return shown if shown is not None else (ROOT / path).read_text(encoding="utf-8")


def changed(paths: list[str]) -> list[str]:
    """Return the files that have changed since the last commit."""
    listed = _git("diff", "--name-only", "--relative", "HEAD", "--", *paths)
    return (listed or "").splitlines()


def _git(*arguments: str) -> str | None:
    """Return what git prints, or None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


PREDICT_FIRST = "Predict first, then open this output."
# What a page says in place of what is folded, by the type that myst-nb gives it
SUMMARIES = {"source": "Show the code of this cell", "output": PREDICT_FIRST, "outputs": PREDICT_FIRST}
_LINK = re.compile(r"\[(?P<text>[^\]]*)]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_HREF = re.compile(r"""(?<=href=['"])(?P<path>[^'":#]+)\.ipynb""")


@dataclass(frozen=True)
class Page:
    """A page that is made from a notebook."""

    kind: str  # "chapters", "labs" or "solutions"
    chapter: str  # such as "04_overlap"
    exists: Callable[[str], bool]  # whether the site has a page for this path
    repository: Repository

    @property
    def path(self) -> str:
        return contents.notebook(self.kind, self.chapter)

    def source(self) -> nbformat.NotebookNode:
        """Return the notebook from which Sphinx makes the page."""
        notebook = nbformat.reads(committed_text(self.path), as_version=4)
        notebook.cells = [cell for cell in links.without_links(notebook) if not _only_asserts(cell)]
        before = ""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = resolved(cell.source, self.path, self.exists, self.repository)
                before = cell.source
            else:
                _prepare(cell, before)
        self._add_links(notebook)
        language = {"language_info": {"name": "python", "pygments_lexer": "cell"}}
        kernel = {"kernelspec": notebook.metadata["kernelspec"]}
        notebook.metadata = nbformat.from_dict(kernel | self._options() | language)
        return notebook

    def _options(self) -> dict:
        """Solutions are not in the table of contents, so that they are only seen by those who look for them."""
        return {"orphan": True} if self.kind == "solutions" else {}

    def _add_links(self, notebook: nbformat.NotebookNode) -> None:
        first = notebook.cells[0]
        title, _, rest = first.source.partition("\n")
        number = self.chapter.split("_")[0]
        if self.kind == "solutions":
            title = title.replace("# Lab ", "# Solution ", 1)
        first.source = f"{title}\n\n{self._row(number)}\n{rest}"
        if self.kind == "labs" and self.exists(solution := contents.notebook("solutions", self.chapter)):
            notebook.cells.append(nbformat.v4.new_markdown_cell(_behind_a_click(f"../{solution}", number)))
        if self.kind == "chapters" and self.exists(lab := contents.notebook("labs", self.chapter)):
            notebook.cells.append(nbformat.v4.new_markdown_cell(f"```{{toctree}}\n:hidden:\n\n../{lab}\n```"))

    def _row(self, number: str) -> str:
        """Return the links below the title as Markdown."""
        others = [kind for kind in ("chapters", "labs") if kind != self.kind]
        row = [
            f"[{links.NAMES[kind]} {number}](../{path})"
            for kind in others
            if self.exists(path := contents.notebook(kind, self.chapter))
        ]
        colab = self.repository.opens_in_colab(self.path) if self.kind != "solutions" else ""
        script = "lesson" if self.kind == "chapters" else "lab"
        edit = self.repository.edits(f"source/{self.chapter}/{script}.py")
        row += [f"[{text}]({target})" for text, target in (("Open in Colab", colab),) if target]
        row.append(f'<a href="../notebooks/{self.path}" download>Download notebook</a>')
        row += [f"[{text}]({target})" for text, target in (("Edit this page", edit),) if target]
        return row_of_links(row)


def row_of_links(items: list[str]) -> str:
    """Return links as Markdown that static/course.css shows as a row."""
    listed = "\n".join(f"- {item}" for item in items)
    return f":::{{container}} page-links\n{listed}\n:::"


def _behind_a_click(path: str, number: str) -> str:
    return (
        "## Our solution\n\n<details><summary>Show the link to our solution</summary>\n\n"
        f"Compare your code with ours once your checks pass: [solution {number}]({path}).\n\n</details>"
    )


def resolved(markdown: str, page: str, exists: Callable[[str], bool], repository: Repository) -> str:
    """Return Markdown in which a link to a file that is not on the site leads to the repository, or is only text.

    Args:
        page: The path of the page in the course, such as "docs/running.md".
    """

    def replace(found: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), found["path"]))
        if path == "README.md":
            path = "index.md"
        if exists(path):
            relative = posixpath.relpath(path, posixpath.dirname(page) or ".")
            return f"[{found['text']}]({relative}{found['anchor'] or ''})"
        address = repository.shows(path)
        return f"[{found['text']}]({address})" if address else found["text"]

    return _LINK.sub(replace, markdown)


def _prepare(cell: nbformat.NotebookNode, before: str) -> None:
    """Fold a code cell as in JupyterLab, describe its figures, and leave out what only a running kernel shows."""
    hidden = cell.metadata.get("jupyter", {})
    tags = set(cell.metadata.get("tags", []))
    kept = {"tags": [], "mystnb": {"image": {"alt": description(before, cell.source)}}}
    cell.outputs = [_shown(output) for output in cell.outputs if not _is_empty(output)]
    if widget := figures.used_in(cell.source):
        place = next(i for i, output in enumerate(cell.outputs) if "image/png" in output.get("data", {}))
        cell.outputs.insert(place, nbformat.v4.new_output("display_data", {"text/html": figures.html(widget)}))
    if hidden.get("source_hidden") or "claims" in tags:
        kept["tags"].append("hide-input")
    if hidden.get("outputs_hidden") and cell.outputs:
        kept["tags"].append("hide-output")
    cell.metadata = nbformat.from_dict(kept)


def _only_asserts(cell: nbformat.NotebookNode) -> bool:
    return "claims" in cell.metadata.get("tags", []) and not cell.outputs


def _is_empty(output) -> bool:
    """Tell whether an output says nothing on a page: an empty text, or the sentence before a folded output."""
    text = output.get("data", {}).get("text/plain", "?") if output.output_type == "display_data" else "?"
    return set(output.get("data", {})) == {"text/plain"} and (not text.strip() or text.startswith("Predict first"))


def _shown(output):
    """Return an output with links that lead to pages."""
    html = output.get("data", {}).get("text/html")
    if html:
        html = _HREF.sub(lambda found: f"{found['path']}.html", html)
        output.data["text/html"] = render(__package__, "parts.html", part="output", html=html)
    return output


def description(before: str, source: str) -> str:
    """Return an alternative text for the figures of a cell: the sentences that introduce the cell, without markup."""
    parts = [part.strip() for part in before.split("\n\n")]
    paragraphs = [part for part in parts if part and not part.startswith(("<", "|", "#", "-", ":::"))]
    text = " ".join(paragraphs[-1].split()) if paragraphs else ""
    text = re.sub(r"\[([^\]]+)]\([^)]*\)", r"\1", text).replace("**", "").replace("`", "").replace("*", "")
    sentences = [each for each in re.split(r"(?<=[.?!]) ", text) if each]
    told = " ".join(sentences[-2:]) or f"The figure that this cell draws: {source.splitlines()[-1]}"
    return "Figure: " + told.rstrip(":")
