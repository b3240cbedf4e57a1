"""The messages of the checks of chapter 01 point at the mistake that was made."""

import re
from pathlib import Path

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from tests import mutants

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

CHAPTER = "01_collectives"
STEP = """
import torch
import torch.distributed as dist


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()
"""


@pytest.fixture(scope="module", autouse=True)
def three_ranks_that_compare_their_calls():
    ranks.start(world_size=3, detect_mismatch=True)  # as in the lab
    yield
    ranks.stop()


def verdict_on(path: Path, piece: str, check: str, text: str):
    path = path / "candidate.py"
    path.write_text(text)
    (verdict,) = run_file("collectives", path, only=piece, check=check)
    assert not verdict.passed
    return verdict


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def code(mutant: str, *changes: tuple[str, str]) -> str:
    """Return the code of a mutant, with more changes."""
    text = mutants.named(CHAPTER, mutant).code()
    for old, new in changes:
        text = replaced(text, old, new)
    return text


def step_to(left: str, right: str) -> str:
    text = replaced(STEP, "group=group, group_peer=left", left)
    return replaced(text, "group=group, group_peer=right", right)


IN_TURNS = """
import torch.distributed as dist


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_rank() > 0:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
    dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
    if dist.get_rank() == 0:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
"""
DIRECTLY = """
import time

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def direct_reduce_scatter(tensor, group=None):
    world_size = dist.get_world_size(group)
    padded = pad(tensor.flatten(), (0, -tensor.numel() % world_size))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    return received.view(world_size, -1).sum(0)
"""
LAUNCHED = "group=group, async_op=True)\n    time.sleep(0.02)"  # long enough, unless a rank is late
GROUP = "does every call get `group`? And is each rank given by its index in the group"
BY_TORCH = "was called; expected only send and recv", "which call is neither?"
FROM_LEFT, TO_RIGHT = "(rank - step - 1) % world_size", "(rank - step) % world_size"
# For each mistake: the piece and the check, the code, and what the evidence and the hint say.
SAID_OF = {
    "a global rank": ("ring_step · group", step_to("peer=left, group=group", "peer=right, group=group"), GROUP),
    "no group": ("ring_step · group", step_to("peer=left", "peer=right"), GROUP),
    "an order by global ranks": (
        "ring_step_in_turns · group",
        IN_TURNS,
        "is each rank given by its index in the group, or by its global rank?",
    ),
    "a wrong neighbor": (
        "ring_step · values",
        code("step_from_the_right"),
        "Hint: from which rank does each rank receive, and does that rank send to it?",
    ),
    "all sends first": (
        "ring_step · values",
        code("step_all_send_first"),
        "which call would end this wait, and what keeps the other rank from reaching it?",
    ),
    "an all-reduce": ("ring_all_reduce · waits", code("reduce_by_torch"), *BY_TORCH),
    "an all-gather": ("ring_all_gather · waits", code("gather_by_torch"), *BY_TORCH),
    "a broadcast": ("tree_broadcast · waits", code("tree_by_torch"), *BY_TORCH),
    "a sum that changes the dtype": (
        "direct_reduce_scatter · dtypes",
        DIRECTLY,
        "int64; expected",
        "which dtype does each call",
    ),
    "a collective among all ranks": (
        "direct_reduce_scatter · group",
        replaced(DIRECTLY, "padded, group=group", "padded"),
        "all_to_all_single among ranks [0, 1, 2], but this rank's group is [1, 2]",
        "Which call in your code leaves out the group?",
    ),
    "a dropped handle": (
        "direct_reduce_scatter · waits",
        replaced(DIRECTLY, "group=group)\n    return", f"{LAUNCHED}\n    return"),
        "A handle was dropped without a call to its wait(): all_to_all_single.",
        "do you call wait() on the handle of each call",
    ),
    "a name that is given to another tensor": (
        "ring_step · values",
        replaced(STEP, "    receive =", "    incoming = outgoing.clone()\n    receive ="),
        "Nothing was written to it",
        "does an assignment",
    ),
    "a step too many": (
        "ring_all_gather · values",
        code("gather_expects_equal_chunks", ("range(world_size - 1)", "range(world_size)")),
        "how many steps are there if N is 1?",
    ),
    "an own shard that is overwritten": (
        "ring_all_gather · values",
        code("gather_expects_equal_chunks", (FROM_LEFT, "(rank - step - 2) % world_size"), (TO_RIGHT, FROM_LEFT)),
        "This rank's own shard was overwritten.",
        "Hint: which chunk has data before the first step?",
    ),
    "an index that is taken for a rank": (
        "tree_broadcast · values",
        code("tree_for_powers_of_two", ("(index + holders + root)", "(index + holders)")),
        "With src=0, it works.",
    ),
}


@pytest.mark.parametrize("mistake", SAID_OF)
def test_a_mistake_is_named_and_hinted_at(tmp_path, mistake):
    where, text, *said = SAID_OF[mistake]
    verdict = verdict_on(tmp_path, *where.split(" · "), text)
    for words in said:
        assert words.lower() in f"{verdict.evidence} {verdict.hint}".lower(), verdict


def test_the_same_evidence_is_reported_once(tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text(mutants.named(CHAPTER, "reduce_by_torch").code())
    evidence = {verdict.check: verdict.evidence for verdict in run_file("collectives", path, only="ring_all_reduce")}
    assert "all_reduce was called" in evidence["waits"] and evidence["wire"] == "the same as in “waits”"


def test_a_padded_result_is_hinted_at(tmp_path):
    text = """
from solutions.collectives import chunks_of, dist, gather_around, ring_reduce_scatter


def ring_all_reduce(tensor, group=None):
    chunks = chunks_of(tensor, dist.get_world_size(group))
    chunks[dist.get_rank(group)].copy_(ring_reduce_scatter(tensor, group))
    gather_around(chunks, group)
"""
    verdict = verdict_on(tmp_path, "ring_all_reduce", "sizes", text)
    assert verdict.evidence.count("11 elements") == 1 and "shape" not in verdict.evidence  # only the call that raised
    assert "The reduce-scatter pads its result." in verdict.hint


def test_an_error_comes_before_the_handles_that_it_has_dropped(tmp_path):
    text = replaced(STEP, "(rank + 1) % world_size", "rank + 1")
    verdict = verdict_on(tmp_path, "ring_step", "values", text)
    assert "failed: IndexError" in verdict.evidence and "dropped the handle" not in verdict.evidence
    assert "does the rank that you send to or receive from exist in the group?" in verdict.hint


def test_the_barrier_of_the_check_is_named_and_no_rank_is_named_twice(tmp_path):
    text = mutants.named(CHAPTER, "turns_open_at_rank_0").code()
    text = replaced(text, "def ring_step_in_turns(", "def ring_step_in_turns_of_all(")
    text += """

def ring_step_in_turns(outgoing, incoming, group=None):
    if dist.get_rank(group) == 0:
        return dist.send(outgoing, group=group, group_dst=1)
    ring_step_in_turns_of_all(outgoing, incoming, group)
"""
    verdict = verdict_on(tmp_path, "ring_step_in_turns", "values", text)
    assert "Rank 0 is not in your code: that barrier is the check's." in verdict.evidence
    assert len(re.findall("^Rank 1 waits", verdict.evidence, re.MULTILINE)) == 1


def test_a_group_that_is_left_out_is_reported_once(tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text(replaced(STEP, "group=group, group_peer=", "peer="))
    evidence = {verdict.check: verdict.evidence for verdict in run_file("collectives", path, only="ring_step")}
    assert "called only by the group" in evidence["group"] and evidence["argument"] == "the same as in “group”"
