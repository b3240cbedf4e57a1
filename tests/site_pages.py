"""Read the site's pages as files, and serve them to a browser."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag


@dataclass(frozen=True)
class Site:
    """A site in a folder."""

    folder: Path

    @cached_property
    def pages(self) -> dict[str, BeautifulSoup]:
        """Return all pages by their path, such as "chapters/00_ranks.html"."""
        paths = sorted(self.folder.rglob("*.html"))
        own = [path for path in paths if path.relative_to(self.folder).parts[0] != "_static"]
        return {str(path.relative_to(self.folder)): parsed(path) for path in own}

    @cached_property
    def links(self) -> dict[str, list[Tag]]:
        """Return the links of every page."""
        return {page: soup.find_all("a", href=True) for page, soup in self.pages.items()}

    def article(self, page: str) -> Tag:
        return self.pages[page].select_one("article.bd-article")

    def broken_links(self) -> list[str]:
        """Return `page: target` for each link, image, script and style whose file or anchor does not exist."""
        found = []
        for page, soup in self.pages.items():
            for element in soup.find_all(lambda element: element.has_attr("href") or element.has_attr("src")):
                target = urlsplit(element.get("href") or element.get("src"))
                if target.scheme or target.netloc:
                    continue
                path = (self.folder / page).parent / unquote(target.path) if target.path else self.folder / page
                exists = path.resolve().is_relative_to(self.folder) and path.is_file()
                name = str(path.resolve().relative_to(self.folder)) if exists else ""
                if not exists or (name in self.pages and not self._has(name, unquote(target.fragment))):
                    found.append(f"{page}: {target.geturl()}")
        return found

    def _has(self, page: str, anchor: str) -> bool:
        return not anchor or anchor in self._anchors[page]

    @cached_property
    def _anchors(self) -> dict[str, set[str]]:
        return {page: {element["id"] for element in soup.find_all(id=True)} for page, soup in self.pages.items()}


def parsed(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and return its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
