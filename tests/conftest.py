"""Fixtures for several test files, such as ranks for all tests of a module, and the distribution over workers."""

import contextlib
import functools
import io
import os
import signal
import zlib
from pathlib import Path

import hypothesis
import pytest

from shared import ranks
from shared.ranks import folders, fork_client, processes

hypothesis.settings.register_profile("course", deadline=None)  # A loaded machine takes longer for an example.
hypothesis.settings.load_profile("course")

# The tests of these files are independent of each other, so they are spread over the workers.
SPREAD = ("test_grade_hostile.py", "test_grade_solutions.py", "test_labs.py", "test_mutants.py")
RANKS = Path(__file__).parent / "shared/ranks"
GROUPS = 64  # of tests per function: so many that the workers end at about the same time


def pytest_collection_modifyitems(items):
    """Move the tests that are spread to the end, because only these can be distributed evenly."""
    items.sort(key=lambda item: item.path.name in SPREAD)


@pytest.hookimpl(optionalhook=True)  # Without xdist, there are no workers.
def pytest_xdist_make_scheduler(config, log):
    """Run a file's tests on one worker, because they share ranks. (xdist 3.8 loses its groups with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if not file.endswith(SPREAD):
                return file
            return f"{file} {test.split('[')[0]} {zlib.crc32(nodeid.encode()) % GROUPS}"

    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def reacts_to_ctrl_c():
    """Undo a shell's setting for background programs, which makes them ignore Ctrl-C. Some tests need Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread per process, because workers and their ranks share the cores."""
    import torch

    torch.set_num_threads(1)


class KeptServer(fork_client.ForkServer):
    """A fork server that starts ranks for one module after the other, so that torch is not imported for each."""

    def __init__(self):
        self.environment = _environment()
        run_dir, held = folders.create()
        super().__init__(run_dir, held=held)

    def close(self, timeout_s: float = 0.0) -> None:
        self.end_ranks()

    def end(self) -> None:
        super().close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session")
def kept_servers():
    servers: list[KeptServer] = []
    yield servers
    for server in servers:
        server.end()


@pytest.fixture(scope="module", autouse=True)
def kept_server(request, kept_servers):
    """Let ranks come from a kept fork server, except in the tests of their start and those that need hosts."""
    if RANKS in request.path.parents:
        yield
        return
    start = processes.surroundings.start_fork_server

    def kept(link: str | None) -> fork_client.ForkServer:
        if link:
            return start(link)
        fits = (each for each in kept_servers if each.runs and each.environment == _environment())
        if (server := next(fits, None)) is None:
            kept_servers.append(server := KeptServer())
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.surroundings, "start_fork_server", kept)
        yield


@pytest.fixture(scope="module")
def ranks_end_with_the_module():
    yield
    ranks.stop()


@pytest.fixture
def four_ranks(ranks_end_with_the_module):
    """Four ranks, which are those of the module's earlier tests if all of them are still alive."""
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(4)
    return ranks


@pytest.fixture
def world(request, four_ranks):
    """Two of the four ranks, or as many as an indirect parameter says. Yields their number."""
    size = getattr(request, "param", 2)
    with ranks.world(size):
        yield size


@pytest.fixture
def two_ranks(ranks_end_with_the_module):
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2)
    return ranks


@pytest.fixture
def displayed(monkeypatch) -> list:
    """What the widgets display: nothing, unless somebody reads the notebook."""
    from shared import widgets

    shown: list = []
    monkeypatch.setattr(widgets, "display", shown.append)
    return shown


@pytest.fixture
def with_a_reader(monkeypatch) -> None:
    """Pretend that somebody reads the notebook."""
    from shared.ranks import reader

    monkeypatch.setattr(reader, "present", lambda: True)


@pytest.fixture(scope="module")
def unpacked_once():
    """Unpack a lab's course only once for all tests of a module."""
    from instructor.grade import course

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        unpack = course.unpacked
        only_once = functools.cache(lambda chapter: stack.enter_context(unpack(chapter)))
        patch.setattr(course, "unpacked", lambda chapter: contextlib.nullcontext(only_once(chapter)))
        yield


@pytest.fixture(scope="module")
def users_of_our_own():
    """Give each test worker user ids of its own, so that processes left behind can be told apart."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    from instructor.grade import sandbox

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "FIRST_USER", sandbox.FIRST_USER + (1 + worker) * sandbox.USERS)
        yield
