"""Build the course's pages: `make site`, or `python -m instructor.site`."""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from instructor.build import ROOT
from instructor.site import addresses, notebooks, sources
from shared.checks.terminal import show_anything

FOLDER = ROOT / "build" / "site"
PACKAGES = ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton", "latex2mathml")


def missing() -> list[str]:
    """Return the packages that the site needs and that are not installed here."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def build(folder: Path, repository: addresses.Repository, log=sys.stdout) -> int:
    """Build the site into a folder. Returns 0 if there were no errors and no warnings."""
    from sphinx.application import Sphinx

    _empty(folder)
    work = folder.with_name(folder.name + "-work")
    sources.write(work / "source", repository)
    settings = {
        "html_extra_path": [str(work / "source" / "files")],
        "html_theme_options.github_url": repository.address if repository.is_known else "",
    }
    app = Sphinx(
        srcdir=work / "source" / "pages",
        confdir=Path(__file__).parent,
        outdir=folder,
        doctreedir=work / "doctrees",
        buildername="html",
        confoverrides=settings,
        freshenv=True,
        status=None,
        warning=log,
        exception_on_warning=False,
    )
    app.build(force_all=True)
    return app.statuscode


def _empty(folder: Path) -> None:
    """Remove an earlier site, because pages of chapters that are gone would stay.

    Raises:
        FileExistsError: If the folder contains something else.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ".buildinfo").exists():
        raise FileExistsError(
            f"{folder} contains something else than a site: choose an empty folder, or that of an earlier site"
        )
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(prog="python -m instructor.site", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/site")
    parser.add_argument("--repository", help="the course's public address; default: the one in pyproject.toml")
    options = parser.parse_args()
    if missing():
        print(f"The site needs {', '.join(missing())}: install the extra `site` with the pins of constraints.txt.")
        return 1
    if changed := notebooks.changed([f"{kind}/*.ipynb" for kind in sources.KINDS]):
        print(f"{len(changed)} notebooks have changed since the last commit. The pages show the committed ones.")
    given = (options.repository or "").removesuffix("/").removesuffix(".git")
    repository = addresses.Repository(given) if given else addresses.declared()
    try:
        status = build(options.folder.resolve(), repository, sys.stderr)
    except FileExistsError as error:
        parser.error(str(error))
    print(f"Wrote {options.folder}. Open {options.folder}/index.html in a browser.")
    if not repository.is_known:
        print("OWNER in pyproject.toml is a placeholder, so pages have no links to Colab and to their source.")
    return status


if __name__ == "__main__":
    sys.exit(main())
