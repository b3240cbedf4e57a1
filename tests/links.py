"""Find the links in Markdown files and in the Markdown cells of notebooks, and the broken ones among them."""

import posixpath
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import nbformat
from markdown_it import MarkdownIt

_MARKDOWN = MarkdownIt("commonmark").enable("table")


def markdown_of(name: str, text: str) -> str:
    if name.endswith(".md"):
        return text
    cells = nbformat.reads(text, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def tokens(markdown: str) -> Iterator:
    for block in _MARKDOWN.parse(markdown):
        yield block
        yield from block.children or []


def links(markdown: str) -> Iterator[str]:
    """Yield the targets of links and images, except addresses on the network."""
    for token in tokens(markdown):
        target = token.attrGet("href") or token.attrGet("src")
        if target and not urlsplit(target).scheme:
            yield unquote(target)


def anchors(markdown: str) -> set[str]:
    """Return the anchors of all headings, as GitHub forms them (`#a-title`) and as JupyterLab does (`#A-title`)."""
    blocks = _MARKDOWN.parse(markdown)
    titles = [blocks[n + 1].content for n, block in enumerate(blocks) if block.type == "heading_open"]
    plain = [re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles]
    return {*plain, *(title.replace(" ", "-") for title in titles)}


def broken(texts: dict[str, str], exists) -> list[str]:
    """Return `file: link` for each link without a target."""
    broken_links = []
    for name, text in texts.items():
        for link in links(markdown_of(name, text)):
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            known = anchors(markdown_of(target, texts[target])) if anchor and target in texts else {anchor}
            if target.startswith("..") or not exists(target) or anchor not in known:
                broken_links.append(f"{name}: {link}")
    return broken_links
