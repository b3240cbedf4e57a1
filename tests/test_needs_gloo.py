"""A variant may be right on gloo but hang on NCCL. Then it hangs under simulated NCCL, and the message says why."""

import re

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from tests.test_mutants import MODULES, TESTS

pytestmark = pytest.mark.slow

PIECES = {
    path: (MODULES[chapter], needs[1])
    for chapter in MODULES
    for path in sorted((TESTS / "variants" / chapter.name).glob("*.py"))
    if (needs := re.search(r"^needs gloo: (\w+)$", path.read_text(), re.MULTILINE))
}


@pytest.fixture(scope="module", autouse=True)
def simulated_nccl():
    ranks.start(world_size=4, detect_mismatch=False, simulate="nccl")
    yield
    ranks.stop()


def test_rings_of_isend_and_irecv_need_gloo():
    assert {piece for _, piece in PIECES.values()} == {"pass_right", "ring_step"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PIECES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_variant_that_needs_gloo_hangs_on_nccl_and_is_told_why(path):
    module, piece = PIECES[path]
    (verdict,) = run_file(module, path, only=piece, check="values")
    assert not verdict.passed
    assert "none of them can continue" in verdict.evidence
    assert "one after another, including isend and irecv, unless they are all in one" in verdict.evidence
