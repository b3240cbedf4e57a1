"""Collect the terms of all lessons into chapters/glossary.md: `make notebooks`, or `python -m instructor.glossary`.

    python -m instructor.glossary            write the page
    python -m instructor.glossary --check    write nothing; exit 1 if the page is out of date

The recap of a lesson ends with a list of the terms that the lesson introduces:

    **Terms**

    - **all-reduce**: every rank contributes a tensor, and every rank gets the sum.
    - **padding** (of sequences): tokens without content that bring sequences to the same length.

The glossary has one entry per bullet, and a link to its lesson. A term is introduced once, so no two lessons may define
the same one. Words in parentheses distinguish terms with the same name.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from instructor import links, pages
from instructor.build import ROOT, Chapter, chapters

PAGE = ROOT / "chapters" / "glossary.md"
HEAD = """<!-- Built by `make notebooks` from the lessons: edit those, not this. -->
# Glossary

The terms of the course in alphabetical order, each with a link to the lesson that introduces it.
"""
_LIST = re.compile(r"^\*\*Terms\*\*\n\n(?P<bullets>(?:- .+\n?(?:  .+\n?)*)*)", re.MULTILINE)
_BULLET = re.compile(r"\*\*(?P<term>[^*]+)\*\*(?: \((?P<kind>[^)]+)\))?: (?P<definition>.+)", re.DOTALL)


class GlossaryError(pages.PageError):
    """The glossary cannot be made; the message says which lesson to change, and how."""


@dataclass(frozen=True)
class Term:
    """A term, as the lesson that introduces it defines it."""

    name: str
    kind: str  # distinguishes it from another term with the same name, or ""
    definition: str
    chapter: str  # the name of the chapter's folder, such as "01_collectives"

    @property
    def key(self) -> tuple[str, str]:
        """Return what identifies the term. The page is sorted by it."""
        return self.name.casefold(), self.kind.casefold()

    def entry(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        link = f"[{links.titles()[self.chapter]}]({self.chapter}.ipynb)"
        return f"- **{self.name}**{kind}: {self.definition} ({link})"


def terms_of(chapter: Chapter) -> list[Term]:
    """Return the terms that a lesson introduces, in its order."""
    prose = [cell.source for cell in chapter.read("lesson").cells if cell.cell_type == "markdown"]
    return [term for source in prose for term in terms_in(source, chapter.name)]


def terms_in(source: str, chapter: str) -> list[Term]:
    """Return the terms of a Markdown cell of a chapter.

    Raises:
        GlossaryError: If a bullet below **Terms** is not a term and its definition.
    """
    found = []
    for terms in _LIST.finditer(source):
        for bullet in re.split(r"^- ", terms["bullets"], flags=re.MULTILINE)[1:]:
            text = " ".join(bullet.split())
            parsed = _BULLET.fullmatch(text)
            if parsed is None:
                raise GlossaryError(f"{chapter}: the bullet {text!r} should be `- **term**: definition`")
            found.append(Term(parsed["term"], parsed["kind"] or "", parsed["definition"], chapter))
    return found


def glossary(of: Iterable[Chapter]) -> list[Term]:
    """Return the terms of some chapters in alphabetical order.

    Raises:
        GlossaryError: If a term is defined twice.
    """
    terms = sorted((term for chapter in of for term in terms_of(chapter)), key=lambda term: term.key)
    problems = [
        f"{one.chapter} and {other.chapter} both define **{one.name}**"
        for one, other in pairwise(terms)
        if one.key == other.key
    ]
    if problems:
        raise GlossaryError("; ".join(problems))
    return terms


def page(of: Iterable[Chapter]) -> str:
    """Return the glossary of some chapters as Markdown."""
    return "\n".join([HEAD, *(term.entry() for term in glossary(of)), ""])


def main() -> int:
    return pages.main(PAGE, lambda: page(chapters()), "instructor.glossary", (__doc__ or "").split("\n")[0])


if __name__ == "__main__":
    sys.exit(main())
