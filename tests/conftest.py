"""What several tests share: ranks that live as long as a module's tests, and which tests share a worker."""

import contextlib
import io
import signal
import zlib

import pytest

from shared import ranks

SPREAD = (
    "test_grade_hostile.py",
    "test_grade_solutions.py",
    "test_labs.py",
    "test_mutants.py",
)  # over workers: their tests need nothing of each other
PARTS = 16


def pytest_collection_modifyitems(items):
    """What is spread comes last, so that the workers end at about the same time."""
    items.sort(key=lambda item: item.path.name in SPREAD)


@pytest.hookimpl(optionalhook=True)  # without xdist there are no workers
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run on one worker, because they share ranks. (With pytest 9.2, xdist 3.8 forgets its groups.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return f"{file} {zlib.crc32(nodeid.encode()) % PARTS}" if file.endswith(SPREAD) else file

    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def heeds_ctrl_c():
    """A shell lets what it starts in the background ignore Ctrl-C; tests of Ctrl-C need it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Two workers and their ranks share the cores: a second thread in each would spin for its turn."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks_end_with_the_module():
    yield
    ranks.stop()


@pytest.fixture
def four_ranks(ranks_end_with_the_module):
    """Four ranks: those that the module's earlier tests ran on, if all of them live."""
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(4)
    return ranks
