"""What several tests share: ranks that live as long as a module's tests, and which tests share a worker."""

import contextlib
import io
import zlib

import pytest

from shared import ranks

MANY = "test_mutants"  # the one file that is spread over workers: its tests need nothing of each other


def pytest_collection_modifyitems(items):
    """A file's tests run in one process, because they share ranks."""
    for item in items:
        file = item.path.stem
        group = f"{file} {zlib.crc32(item.nodeid.encode()) % 4}" if file == MANY else file
        item.add_marker(pytest.mark.xdist_group(group))


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
