"""A pytest plugin: choose tests, report each one to the runner, and clean up after one that ran out of time.

It is loaded with `-p tests.runner.plugin`. With pytest-xdist, it also runs in every worker, but only the controller,
which receives the results of all workers, reports to the runner.
"""

import functools
import json
import os
import re
import sys
from pathlib import Path

import pytest
import pytest_timeout

from shared.deadlines import MOST_ROUNDS, scaled

COLOR = re.compile(r"\x1b\[[0-9;]*m")
OUT_OF_TIME = "from pytest-timeout"
LONGEST_REASON = 300
# Claims about times are not errors in tests, so a few rounds are enough. The notebooks are built with all rounds.
ROUNDS_IN_NOTEBOOKS = "3"
MOST_KERNEL_STARTS = 3


def pytest_addoption(parser):
    group = parser.getgroup("course")
    group.addoption("--events", metavar="FILE", help="write a line of JSON to FILE for each event of a test")
    group.addoption("--chapter", metavar="NAME", help="run only the tests of this chapter, such as 09_zero3")
    group.addoption("--only", metavar="FILE", help="run only the tests whose ids are the lines of FILE")


def pytest_configure(config):
    if runs_notebooks(config):
        from nbval import kernel  # Other runs start faster without it.

        os.environ.setdefault(MOST_ROUNDS, ROUNDS_IN_NOTEBOOKS)
        kernel.start_new_kernel = with_retries(kernel.start_new_kernel)
    is_worker = hasattr(config, "workerinput")
    if config.option.events and not is_worker:
        config.pluginmanager.register(Reporter(Path(config.option.events)))


def with_retries(start):
    """Return nbval's start_new_kernel(), which starts the kernel again if it died while it started.

    A kernel binds the ports that were chosen for it a second later. Until then, a connection of a rank can take one.
    """

    @functools.wraps(start)
    def start_again(**options):
        for _ in range(MOST_KERNEL_STARTS - 1):
            try:
                return start(**options)
            except RuntimeError as error:
                print(f"started the kernel again: {error}", file=sys.stderr)
        return start(**options)

    return start_again


# --- which tests run --------------------------------------------------------------------------------


def pytest_collection_modifyitems(config, items):
    for cell in items:
        if hasattr(cell, "output_timeout"):  # nbval has no option for how long it waits for an output.
            cell.output_timeout = scaled(cell.output_timeout)
    if runs_notebooks(config):  # Later chapters take longer. If they came last, most workers would have nothing to do.
        items.sort(key=lambda cell: cell.path.name, reverse=True)
    kept = items[:]
    if config.option.chapter:
        kept = [item for item in kept if belongs_to(item, config.option.chapter)]
    if config.option.only:
        wanted = set(Path(config.option.only).read_text().splitlines())
        kept = [item for item in kept if item.nodeid in wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def runs_notebooks(config) -> bool:
    return getattr(config.option, "nbval", False)  # nbval may not be loaded


def belongs_to(item: pytest.Item, chapter: str) -> bool:
    """Tell whether a test is about a chapter, such as 09_zero3.

    It is if the chapter's name is in its id (a mutant, a variant, a lab). If it is not exhaustive, the name may also be
    in its file name (test_zero3.py) or in a mark: `@pytest.mark.chapter("zero1", "zero3")`.
    """
    if item.get_closest_marker("exhaustive"):
        return chapter in item.name
    title = chapter.split("_", 1)[1]
    marked = {name for mark in item.iter_markers("chapter") for name in mark.args}
    in_file = re.match(rf"test_{title}(_|$)", item.path.stem) is not None
    return chapter in item.name or title in marked or in_file


# --- reports to the runner --------------------------------------------------------------------------


class Reporter:
    """Writes one line of JSON for each event, as soon as it happens."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1)

    def _report(self, **event) -> None:
        self._file.write(json.dumps(event) + "\n")

    def pytest_collection_finish(self, session):
        self._report(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)  # It is called only by pytest-xdist.
    def pytest_xdist_node_collection_finished(self, ids):
        self._report(collected=ids)

    def pytest_collectreport(self, report):
        if report.failed:
            self._report(report=report.nodeid, outcome="failed", seconds=0.0, reason=reason_of(report), properties={})

    def pytest_runtest_logstart(self, nodeid):
        self._report(started=nodeid)

    def pytest_runtest_logreport(self, report):
        reason = "" if report.passed else reason_of(report)
        properties = dict(report.user_properties)
        event = {"outcome": report.outcome, "seconds": report.duration, "reason": reason, "properties": properties}
        self._report(report=report.nodeid, **event)
        if report.when not in ("setup", "call"):  # After a crash, pytest-xdist reports the phase "???" and no end.
            self._report(finished=report.nodeid)

    def pytest_unconfigure(self):
        self._file.close()


def reason_of(report) -> str:
    """Return one line that says why and where a test failed or was skipped."""
    if isinstance(report.longrepr, tuple):  # skipped: file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return _shortened(_gist(COLOR.sub("", str(report.longrepr))))
    first, *more = [line.strip() for line in crash.message.splitlines() if line.strip()] or ["no message"]
    asserted = next((line for line in more if line.startswith("assert ")), "")
    return _shortened(f"{Path(crash.path).name}:{crash.lineno}: {first} {asserted}".strip())


def _gist(text: str) -> str:
    """Return the informative lines of a plain text report, from nbval, a crashed worker or a broken file."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    cell = next((line for line in lines if re.match(r"Cell \d+: ", line)), None)
    raised = [line for line in lines if re.match(r"(E\s+)?\w*(Error|Failed|Exception|Interrupt)\b", line)]
    return " · ".join(dict.fromkeys([*([cell] if cell else lines[:1]), *raised[-1:]]))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


# --- after a test that ran out of time --------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact(node):
    """Give a failed test's teardown a deadline too, because pytest-timeout cancels its timer when the test fails."""
    yield
    if isinstance(node, pytest.Item) and node.config.option.timeout:
        settings = pytest_timeout.Settings(node.config.option.timeout, "signal", False, False)
        node.config.hook.pytest_timeout_set_timer(item=node, settings=settings)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo and OUT_OF_TIME in str(call.excinfo.value):
        end_kernel(item)
        replace_ranks()
    return report


def end_kernel(item: pytest.Item) -> None:
    """End the kernel of a cell that ran out of time. nbval then expects the notebook's other cells to fail."""
    kernel = getattr(item.parent, "kernel", None)
    if kernel is not None:
        item.parent.timed_out = True
        kernel.stop()


def replace_ranks() -> None:
    """Replace this process's ranks, because the old ones may still be running the test's code."""
    running = sys.modules.get("shared.ranks.running")
    if running is None or running.find() is None:
        return
    try:
        running.current().restart()
    except Exception:
        sys.modules["shared.ranks"].stop()
