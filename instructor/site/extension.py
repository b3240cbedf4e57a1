"""A Sphinx extension: formulas become MathML, and folded cells become <details>.

Browsers draw MathML with their own fonts, and screen readers can read it. MathJax would have to be downloaded, or to
be copied (over 1 MB).
"""

from html import escape

from docutils import nodes
from latex2mathml.converter import convert
from pygments.lexer import bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Keyword, String

from instructor.site.notebooks import PREDICT_FIRST, SUMMARIES
from shared.tables.rendering import render


class CellLexer(PythonLexer):
    """Colors a cell as Python even below a line such as %%ranks, where IPython's lexer gives up."""

    name, aliases, filenames = "Cell", ["cell"], []
    tokens = PythonLexer.tokens | {
        "root": [(r"^(%%?\w+)(.*)$", bygroups(Keyword, String)), (r"^!.*$", String), *PythonLexer.tokens["root"]]
    }


def visit_inline_math(translator, node) -> None:
    translator.body.append(render(__package__, "math_inline.html", mathml=convert(node.astext())))
    raise nodes.SkipNode


def visit_math(translator, node) -> None:
    mathml = convert(node.astext(), display="block")
    translator.body.append(render(__package__, "math_block.html", mathml=mathml))
    raise nodes.SkipNode


def visit_folded(translator, node) -> None:
    summary = SUMMARIES[node["prompt_show"]]
    names = "fold answer" if summary == PREDICT_FIRST else "fold"
    translator.body.append(f'<details class="{names}"><summary>{escape(summary)}</summary>\n')


def depart_folded(translator, node) -> None:
    translator.body.append("</details>\n")


def setup(app) -> dict:
    from myst_nb.sphinx_ import HideCodeCellNode

    app.setup_extension("myst_nb")
    app.add_lexer("cell", CellLexer)
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline_math, None), block_renderers=(visit_math, None))
    app.add_node(HideCodeCellNode, override=True, html=(visit_folded, depart_folded))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
