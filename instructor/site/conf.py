"""Sphinx's configuration of the course's pages. `instructor.site.command` passes what depends on the address.

Formulas become MathML, which browsers draw with their own fonts, and which screen readers can read. MathJax would have
to be downloaded, or to be copied (over 1 MB).
"""

from html import escape

from docutils import nodes
from latex2mathml.converter import convert
from pygments.lexer import bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Keyword, String

from instructor.site.notebooks import PREDICT_FIRST, SUMMARIES
from shared.tables import render

project = "Distributed training, built by hand"
html_title = project
html_favicon = "static/favicon.svg"
html_context = {"default_mode": "auto"}
author = "the course's authors"
language = "en"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["_build"]

# Notebooks: show what is stored.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # Its default is a script on the network.
nb_code_prompt_show = "{type}"  # `visit_folded` writes a sentence for each type.
nb_render_error_lexer = "myst-ansi"  # Errors have the colors of a terminal.
suppress_warnings = ["misc.highlighting_failure"]  # Some code blocks are sketches with … in them.
nb_render_markdown_format = "myst"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False
html_math_renderer = "mathml"

# The pages
html_theme = "pydata_sphinx_theme"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["course.css"]
html_js_files = [("course.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_use_index = False
html_last_updated_fmt = None
html_sidebars = {"**": ["contents.html"]}
copybutton_selector = "div.highlight:not(.cell_output *)>pre"  # all code, and no outputs
html_theme_options = {
    "logo": {"text": "Distributed training"},
    "navbar_start": ["navbar-logo"],
    "navbar_center": [],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "navbar_persistent": ["search-button-field"],
    "search_bar_text": "Search the course",
    "article_header_start": [],
    "secondary_sidebar_items": ["page-toc"],
    "primary_sidebar_end": [],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "navigation_depth": 2,
    "show_prev_next": True,
    "use_edit_page_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_show_copyright = False
html_show_sphinx = False


class CellLexer(PythonLexer):
    """Colors a cell as Python even below a line such as %%ranks, where IPython's lexer gives up."""

    name, aliases, filenames = "Cell", ["cell"], []
    tokens = PythonLexer.tokens | {
        "root": [(r"^(%%?\w+)(.*)$", bygroups(Keyword, String)), (r"^!.*$", String), *PythonLexer.tokens["root"]]
    }


def visit_inline_math(translator, node) -> None:
    translator.body.append(render("instructor.site", "parts.html", part="formula", mathml=convert(node.astext())))
    raise nodes.SkipNode


def visit_math(translator, node) -> None:
    mathml = convert(node.astext(), display="block")
    translator.body.append(render("instructor.site", "parts.html", part="displayed formula", mathml=mathml))
    raise nodes.SkipNode


def visit_folded(translator, node) -> None:
    summary = SUMMARIES[node["prompt_show"]]
    names = "fold answer" if summary == PREDICT_FIRST else "fold"
    translator.body.append(f'<details class="{names}"><summary>{escape(summary)}</summary>\n')


def depart_folded(translator, node) -> None:
    translator.body.append("</details>\n")


def setup(app) -> None:
    from myst_nb.sphinx_ import HideCodeCellNode

    app.add_lexer("cell", CellLexer)
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline_math, None), block_renderers=(visit_math, None))
    app.add_node(HideCodeCellNode, override=True, html=(visit_folded, depart_folded))
