"""What several tests share: ranks that live as long as a module's tests, and which tests share a worker."""

import contextlib
import io
import zlib

import pytest

from shared import ranks

SPREAD = ("test_labs", "test_mutants")  # over workers: their tests need nothing of each other
PARTS = 16


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items):
    """A file's tests run in one process, because they share ranks. What is spread comes last, and ends evenly."""
    items.sort(key=lambda item: item.path.stem in SPREAD)
    for item in items:
        file = item.path.stem
        group = f"{file} {zlib.crc32(item.nodeid.encode()) % PARTS}" if file in SPREAD else file
        item.add_marker(pytest.mark.xdist_group(group))


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
