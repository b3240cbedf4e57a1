"""What several tests share: ranks that live as long as a module's tests, and which tests share a worker."""

import contextlib
import io
import signal
import zlib

import pytest

from shared import ranks

# Files whose tests need nothing of each other: they are spread over the workers.
SPREAD = ("test_grade_hostile.py", "test_grade_solutions.py", "test_labs.py", "test_mutants.py")
PARTS = 64  # of each function's tests: small enough that the workers end at about the same time


def pytest_collection_modifyitems(items):
    """Put what is spread at the end, because only that can be shared out evenly."""
    items.sort(key=lambda item: item.path.name in SPREAD)


@pytest.hookimpl(optionalhook=True)  # without xdist there are no workers
def pytest_xdist_make_scheduler(config, log):
    """Run a file's tests on one worker, because they share ranks. (With pytest 9.2, xdist 3.8 forgets its groups.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if not file.endswith(SPREAD):
                return file
            return f"{file} {test.split('[')[0]} {zlib.crc32(nodeid.encode()) % PARTS}"

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
