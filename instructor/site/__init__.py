"""The course as web pages, for people who want to read it before they install it: `make site`.

command.py    the command line (started by __main__.py): writes the sources of the pages, then runs Sphinx on them
sources.py    the sources: the start page, the notebooks, the glossary, docs/, and what can be downloaded
notebooks.py  turns a committed notebook into the source of a page: folds answers, describes figures, adds links
figures.py    what the widgets show for each choice, computed beforehand, because a page has no kernel
addresses.py  the course's public address, and what follows from it: links to Colab and to the source
conf.py       Sphinx's configuration: also turns formulas into MathML, which browsers draw without a script, and folded
              cells into <details>; templates/ and static/ are its HTML, CSS and JavaScript

Nothing is executed: pages show the outputs that `make notebooks` has stored. A page loads nothing from the network.
"""
