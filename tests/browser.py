"""The course in a browser, as a student has it: `make lab` on a copy, headless Chromium, JupyterLab's menus and keys.

The copy is of the files that git tracks, so that saving a notebook changes nothing here. Server, kernels, ranks and
browser bear a mark in their environment, by which `processes` finds what was left running.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing but this machine can be reached: a page that needs more complains in the console.
BROWSER_ARGUMENTS = (
    "--no-sandbox",  # which root, as one is in a container, may not have
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
DEADLINE_S = 60.0  # of one wait: generous, because other tests may have the cores
MARK = "COURSE_BROWSER_TEST"

# What the console may say. Each with its reason, as narrow as can be.
TOLERATED: dict[str, str] = {}


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def wait_until(what: str, condition: Callable[[], object], page: Page | None = None, deadline_s: float = DEADLINE_S):
    """Ask again and again. → what condition gave when it was true. Raises: TimeoutError that says what never came."""
    ends = time.monotonic() + deadline_s
    while not (answer := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {deadline_s:g} s in vain until {what}")
        page.wait_for_timeout(100) if page else time.sleep(0.1)  # the page's own wait lets its events through
    return answer


# -- the server


def copy_course(folder: Path) -> Path:
    """Copy what git tracks, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def newcomers_environment(course: Path, home: Path, mark: str) -> dict[str, str]:
    """Of somebody who never used Jupyter, and has this Python's packages; the course's own are the copy's."""
    ours = ("PYTEST_", "JUPYTER", "JPY_", "MAKE", "MFLAGS", "COURSE_", "RANKS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    own = {name: str(home / name.lower()) for name in folders}
    return kept | own | {"COURSE_VENV": sys.prefix, "PYTHONPATH": str(course), MARK: mark}


@contextlib.contextmanager
def make_lab(course: Path, environment: dict[str, str], log: Path) -> Iterator[str]:
    """Run `make lab` in a copy of the course. → the address that it prints for a browser

    The environment stands already: its target is taken for done, or bootstrap.py would make it anew for the copy.
    """
    command = ["make", "--old-file=environment", "lab", "LAB_ARGS=--no-browser --ip=127.0.0.1"]
    options = {"cwd": course, "env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)

    def address() -> str | None:
        assert server.poll() is None, f"`make lab` ended by itself:\n{log.read_text()[-3000:]}"
        found = re.search(r"http://127\.0\.0\.1:\S+token=\w+", log.read_text())
        return found and found.group()

    try:
        yield wait_until("`make lab` printed an address", address)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:  # then its processes are found by their mark
            server.kill()


def processes(mark: str) -> list[psutil.Process]:
    """→ what runs with this mark, however it was started"""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def nothing_left(deadline_s: float = 20.0) -> Iterator[str]:
    """Give a mark. → it; behind the block, what still bears it is ended, and is an error"""
    mark = uuid.uuid4().hex
    try:
        yield mark
    finally:
        with contextlib.suppress(TimeoutError):
            wait_until("all processes ended", lambda: not processes(mark), deadline_s=deadline_s)
        left = processes(mark)
        names = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        assert not left, f"still running {deadline_s:g} s after the server's end: {names}"


# -- the browser


@contextlib.contextmanager
def browser(path: str, profile: Path, mark: str) -> Iterator[BrowserContext]:
    """Chromium as on its first day."""
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
    """→ a list that grows by each error in the page's console, and each that no script caught"""
    heard: list[str] = []

    def note(message: ConsoleMessage) -> None:
        said = f"{message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not any(re.search(pattern, said) for pattern in TOLERATED):
            heard.append(said)

    page.on("console", note)
    page.on("pageerror", lambda error: heard.append(f"not caught: {error}"))
    return heard


class Lab:
    """One notebook in JupyterLab. Only what a student can do: menus, clicks and keys."""

    def __init__(self, page: Page, file: Path):
        self.page, self.file = page, file
        cells = nbformat.read(file, as_version=4).cells
        self.sources = [cell.source for cell in cells if cell.cell_type == "code"]  # as they were before any change

    def wait_until_ready(self) -> "Lab":
        def ready() -> bool:
            return self.cells.count() > 0 and "| Idle" in self.page.locator("#jp-main-statusbar").inner_text()

        wait_until(f"{self.file.name} was open and its kernel idle", ready, self.page)
        return self

    @property
    def cells(self) -> Locator:
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")

    def cell(self, wanted: str) -> Locator:
        """→ the one code cell whose source has these words"""
        found = [number for number, source in enumerate(self.sources) if wanted in source]
        assert len(found) == 1, f"{len(found)} cells of {self.file.name} have {wanted!r}"
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").nth(found[0])

    def choose(self, menu: str, *entries: str) -> None:
        self.page.locator(".lm-MenuBar-itemLabel").get_by_text(menu, exact=True).click()
        for entry in entries:
            self.page.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def forget_outputs(self) -> None:
        """Clear what an earlier session left: its numbers could be taken for this one's."""
        self.choose("Edit", "Clear Outputs of All Cells")

    def write(self, cell: Locator, source: str) -> None:
        cell.locator(".cm-content").fill(source)

    def run(self, cell: Locator) -> Locator:
        """Run a cell by Shift+Enter, and wait for its end. → the cell"""
        before = self.number(cell)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

        def done() -> bool:
            return self.number(cell) not in (before, "*", " ", "")

        wait_until(f"the cell {cell.locator('.cm-content').text_content()!r} had run", done, self.page)
        return cell

    def number(self, cell: Locator) -> str:
        """→ what stands in the brackets before a cell: its number, * while it waits or runs, or nothing"""
        return (cell.locator(".jp-InputPrompt").text_content() or "").strip("[]: ")

    def picture(self, name: str, whole: bool = False) -> None:
        """Keep a screenshot as build/screenshots/name.png; whole: of the notebook from its first cell to its last."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        usual = self.page.viewport_size
        for _ in range(3 if whole else 0):  # cells out of sight are first taken for as high as they might be
            rows = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")
            rows.evaluate("element => element.scrollTo(0, 0)")
            last = self.cells.last.bounding_box()
            self.page.set_viewport_size(
                {"width": usual["width"], "height": min(16_000, int(last["y"] + last["height"]) + 40)}
            )
            self.page.wait_for_timeout(500)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        self.page.set_viewport_size(usual)
