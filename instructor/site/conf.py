"""Sphinx's configuration of the course's pages. `instructor.site.command` passes what depends on the address."""

project = "Distributed training, built by hand"
html_title = project
html_favicon = "static/favicon.svg"
html_context = {"default_mode": "auto"}
author = "the course's authors"
language = "en"
extensions = ["myst_nb", "sphinx_copybutton", "instructor.site.extension"]
exclude_patterns = ["_build"]

# Notebooks: show what is stored.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # Its default is a script on the network.
nb_code_prompt_show = "{type}"  # The extension writes a sentence for each type.
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
