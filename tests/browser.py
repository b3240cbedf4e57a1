"""Drive the course's notebooks in JupyterLab and headless Chromium as a student does: by menus, clicks and keys."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, sync_playwright

from tests import lab_server
from tests.lab_server import DEADLINE_S, MARK, ROOT

FIRST_LESSON = "chapters/00_ranks.ipynb"
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Only this machine can be reached. A page that needs anything else reports an error in the console.
BROWSER_ARGUMENTS = (
    "--no-sandbox",  # Chromium has no sandbox as root, which is usual in a container.
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser(path: str, profile: Path, mark: str) -> Iterator[BrowserContext]:
    """Start Chromium with an empty profile."""
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=path,
            headless=True,
            args=BROWSER_ARGUMENTS,
            env=os.environ | {MARK: mark},
            viewport={"width": 1280, "height": 900},
        )
        context.set_default_timeout(1000 * DEADLINE_S)
        try:
            yield context
        finally:
            context.close()


def listen(page: Page) -> list[str]:
    """Return a list to which every console error and every uncaught exception of the page is added."""
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(f"{page.url}: {message.text} ({message.location.get('url', '')})")

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(f"{page.url}: not caught: {error}"))
    return errors


class Lab:
    """One notebook in JupyterLab, used by menus, clicks and keys."""

    def __init__(self, page: Page, file: Path):
        self.page, self.file = page, file
        cells = nbformat.read(file, as_version=4).cells
        self.sources = [cell.source for cell in cells if cell.cell_type == "code"]  # before any change

    def wait_until(self, what: str, condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
        """Wait for a condition while the page handles its events."""
        lab_server.wait_until(what, condition, lambda seconds: self.page.wait_for_timeout(1000 * seconds), deadline_s)

    def wait_until_ready(self) -> "Lab":
        self.wait_until(f"{self.file.name} was open", lambda: self.cells.count() > 0)
        self.wait_until(f"the kernel of {self.file.name} was idle", self.is_idle)
        return self

    def is_idle(self) -> bool:
        return "| Idle" in self.page.locator("#jp-main-statusbar").inner_text()

    @property
    def cells(self) -> Locator:
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")

    def cell(self, text: str, before: int = 0) -> Locator:
        """Return the one code cell whose source contains this text, or a code cell before it."""
        found = [index for index, source in enumerate(self.sources) if text in source]
        assert len(found) == 1, f"{len(found)} cells of {self.file.name} contain {text!r}, expected 1"
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").nth(found[0] - before)

    def choose(self, menu: str, *entries: str) -> None:
        self.page.locator(".lm-MenuBar-itemLabel").get_by_text(menu, exact=True).click()
        for entry in entries:
            self.page.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def scroll_through(self) -> None:
        """Scroll from the top to the bottom, as somebody who skims the notebook."""
        rows = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")
        for tenth in range(11):
            rows.evaluate("(element, tenth) => element.scrollTo(0, element.scrollHeight * tenth / 10)", tenth)
            self.page.wait_for_timeout(200)

    def has_unsaved_changes(self) -> bool:
        tab = self.page.locator("#jp-main-dock-panel .lm-TabBar-tab.jp-mod-current")
        return "jp-mod-dirty" in (tab.get_attribute("class") or "")

    def save(self) -> None:
        self.page.keyboard.press("Control+s")
        self.page.locator("#jp-main-statusbar").get_by_text("Saving completed").wait_for()

    def clear_outputs(self) -> None:
        """Clear the outputs of earlier sessions, so that they are not taken for outputs of this one."""
        self.choose("Edit", "Clear Outputs of All Cells")

    def write(self, cell: Locator, source: str) -> None:
        cell.locator(".cm-content").fill(source)

    def run(self, cell: Locator) -> Locator:
        """Run a cell by Shift+Enter, and wait until it ends. Returns the cell."""
        before = self.execution_count(cell)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

        def done() -> bool:
            return self.execution_count(cell) not in (before, "*", " ", "")

        self.wait_until(f"the cell {cell.locator('.cm-content').text_content()!r} had run", done)
        return cell

    def execution_count(self, cell: Locator) -> str:
        """Return the text in the brackets before a cell: its number, * while it waits or runs, or nothing."""
        return (cell.locator(".jp-InputPrompt").text_content() or "").strip("[]: ")

    def screenshot(self, name: str, whole: bool = False) -> None:
        """Save a screenshot as build/screenshots/<name>.png, of the whole notebook if `whole`."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        usual = self.page.viewport_size
        for _ in range(3 if whole else 0):  # JupyterLab only estimates the height of cells that it has not shown yet.
            rows = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")
            rows.evaluate("element => element.scrollTo(0, 0)")
            last = self.cells.last.bounding_box()
            self.page.set_viewport_size(
                {"width": usual["width"], "height": min(16_000, int(last["y"] + last["height"]) + 40)}
            )
            self.page.wait_for_timeout(500)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        self.page.set_viewport_size(usual)


@dataclass
class Course:
    """A course that is open in a browser, with its open notebooks and the errors of their pages."""

    folder: Path
    address: str
    context: BrowserContext
    errors: list[list[str]] = field(default_factory=list)
    labs: dict[str, Lab] = field(default_factory=dict)

    def open(self, name: str) -> Lab:
        """Open a notebook on its own page and in its own workspace, again if a test has closed its page."""
        if name not in self.labs or self.labs[name].page.is_closed():
            path = f"/lab/workspaces/{len(self.errors)}/tree/{name}"
            page = self.new_page()
            page.goto(re.sub(r"/lab/tree/[^?]*", path, self.address))
            self.labs[name] = Lab(page, self.folder / name).wait_until_ready()
        self.labs[name].page.bring_to_front()
        return self.labs[name]

    def new_page(self) -> Page:
        """Return an empty page whose errors are collected."""
        page = self.context.new_page()
        self.errors.append(listen(page))
        return page
