"""The messages of chapter 17's checks name the mistake, and ask about the line that makes it."""

from pathlib import Path

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from shared.checks.gspmd.cases import describe_bytes
from tests import mutants

pytestmark = [pytest.mark.slow, pytest.mark.chapter("gspmd")]

CHAPTER = "17_gspmd"


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(path: Path, piece: str, check: str):
    (verdict,) = run_file("gspmd", path, only=piece, check=check)
    assert not verdict.passed
    return verdict


@pytest.mark.parametrize(
    ("mutant", "piece", "check", "hint"),
    [
        ("shard_rules_without_dim_0", "shard_rules", "matrix product", "in which dimension? (0 is a dimension, too.)"),
        ("shard_rules_sum_is_replicated", "shard_rules", "matrix product", "what does its result contain"),
        ("shard_rules_in_reverse", "shard_rules", "matrix product", "in which order"),
        ("plan_takes_the_last_of_equals", "propagate", "equal plans", "which of the equal plans do you take"),
        ("redistribute_returns_nothing", "redistribute", "plain changes", "in place return"),
        ("parts_added_in_place", "local_part", "more ranks", "writes to one of `parts`"),
    ],
)
def test_a_mistake_gets_its_own_hint(tmp_path, mutant, piece, check, hint):
    assert hint in verdict_on(mutants.named(CHAPTER, mutant).write(tmp_path), piece, check).hint


def test_a_piece_that_returns_nothing_is_named(tmp_path):
    path = mutants.named(CHAPTER, "redistribute_returns_nothing").write(tmp_path)
    verdict = verdict_on(path, "redistribute", "plain changes")
    assert "redistribute returned None, expected a tensor" in verdict.evidence


def test_shards_of_a_given_length_are_told_from_a_number_of_shards(tmp_path):
    path, right = tmp_path / "candidate.py", mutants.named(CHAPTER, "parts_replicated_is_summed").code()
    path.write_text(right.replace("tensor.chunk(", "tensor.split("))
    assert "the number of shards, or their length?" in verdict_on(path, "local_part", "two ranks").hint


def test_unequal_bytes_do_not_look_equal():
    assert describe_bytes(11_931_947, 11_931_946.67) == ["11,931,947.0", "11,931,946.7"]
    assert describe_bytes(1024, 2048.0) == ["1,024", "2,048"]
