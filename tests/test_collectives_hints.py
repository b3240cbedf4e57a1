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


@pytest.mark.parametrize("mistake", ["peer={}, group=group", "peer={}"], ids=["global rank", "no group"])
def test_a_rank_outside_the_group_is_blamed_on_the_call(tmp_path, mistake):
    text = STEP
    for peer in ("left", "right"):
        text = replaced(text, f"group=group, group_peer={peer}", mistake.format(peer))
    verdict = verdict_on(tmp_path, "ring_step", "group", text)
    assert "does every call get `group`? And is each rank given by its index in the group" in verdict.hint


def test_an_order_by_global_ranks_is_blamed_on_the_group(tmp_path):
    text = """
import torch.distributed as dist


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_rank() > 0:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
    dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
    if dist.get_rank() == 0:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
"""
    verdict = verdict_on(tmp_path, "ring_step_in_turns", "group", text)
    assert "is each rank given by its index in the group, or by its global rank?" in verdict.hint


def test_a_wrong_neighbor_is_not_blamed_on_the_order(tmp_path):
    verdict = verdict_on(tmp_path, "ring_step", "values", mutants.named(CHAPTER, "step_from_the_right").code())
    assert verdict.hint == "Hint: from which rank does each rank receive, and does that rank send to it?"


def test_sends_that_all_come_first_are_blamed_on_the_order(tmp_path):
    verdict = verdict_on(tmp_path, "ring_step", "values", mutants.named(CHAPTER, "step_all_send_first").code())
    assert "which call would end this wait, and what keeps the other rank from reaching it?" in verdict.hint


@pytest.mark.parametrize(
    ("mutant", "piece"),
    [
        ("reduce_by_torch", "ring_all_reduce"),
        ("gather_by_torch", "ring_all_gather"),
        ("tree_by_torch", "tree_broadcast"),
    ],
)
def test_waiting_is_not_judged_where_a_collective_of_torch_is_called(tmp_path, mutant, piece):
    verdict = verdict_on(tmp_path, piece, "waits", mutants.named(CHAPTER, mutant).code())
    assert "was called; expected only send and recv" in verdict.evidence and "which call is neither?" in verdict.hint


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


def test_a_sum_that_changes_the_dtype_is_hinted_at(tmp_path):
    text = """
import torch
import torch.distributed as dist


def direct_reduce_scatter(tensor, group=None):
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    return received.view(dist.get_world_size(group), -1).sum(0)
"""
    verdict = verdict_on(tmp_path, "direct_reduce_scatter", "dtypes", text)
    assert "int64; expected" in verdict.evidence and "which dtype does each call" in verdict.hint


def test_a_collective_among_all_ranks_is_blamed_on_the_call(tmp_path):
    text = """
import torch
import torch.distributed as dist
from torch.nn.functional import pad


def direct_reduce_scatter(tensor, group=None):
    world_size = dist.get_world_size(group)
    padded = pad(tensor.flatten(), (0, -tensor.numel() % world_size))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    return received.view(world_size, -1).sum(0)
"""
    verdict = verdict_on(tmp_path, "direct_reduce_scatter", "group", text)
    assert "all_to_all_single among ranks [0, 1, 2], but this rank's group is [1, 2]" in verdict.evidence
    assert "Which call in your code leaves out the group?" in verdict.hint


def test_an_error_comes_before_the_handles_that_it_has_dropped(tmp_path):
    text = replaced(STEP, "(rank + 1) % world_size", "rank + 1")
    verdict = verdict_on(tmp_path, "ring_step", "values", text)
    assert "failed: IndexError" in verdict.evidence and "dropped the handle" not in verdict.evidence
    assert "does the rank that you send to or receive from exist in the group?" in verdict.hint


def test_a_name_that_is_given_to_another_tensor_is_hinted_at(tmp_path):
    text = replaced(STEP, "    receive =", "    incoming = outgoing.clone()\n    receive =")
    verdict = verdict_on(tmp_path, "ring_step", "values", text)
    assert "Nothing was written to it" in verdict.evidence and "does an assignment" in verdict.hint.lower()


def test_a_step_too_many_on_one_rank_is_hinted_at(tmp_path):
    text = mutants.named(CHAPTER, "gather_expects_equal_chunks").code()
    text = replaced(text, "range(world_size - 1)", "range(world_size)")
    verdict = verdict_on(tmp_path, "ring_all_gather", "values", text)
    assert "how many steps are there if N is 1?" in verdict.hint


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


def test_an_own_shard_that_is_overwritten_is_named(tmp_path):
    text = mutants.named(CHAPTER, "gather_expects_equal_chunks").code()
    text = replaced(text, "(rank - step - 1) % world_size", "(rank - step - 2) % world_size")
    text = replaced(text, "(rank - step) % world_size", "(rank - step - 1) % world_size")
    verdict = verdict_on(tmp_path, "ring_all_gather", "values", text)
    assert "This rank's own shard was overwritten." in verdict.evidence
    assert verdict.hint == "Hint: which chunk has data before the first step?"


def test_an_index_that_is_taken_for_a_rank_is_hinted_at(tmp_path):
    text = mutants.named(CHAPTER, "tree_for_powers_of_two").code()
    text = replaced(text, "(index + holders + root)", "(index + holders)")
    verdict = verdict_on(tmp_path, "tree_broadcast", "values", text)
    assert verdict.hint.startswith("With src=0, it works.")


def test_the_dropped_handle_of_a_collective_is_named(tmp_path):
    text = """
import time

import torch
import torch.distributed as dist


def direct_reduce_scatter(tensor, group=None):
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group, async_op=True)
    time.sleep(0.02)  # long enough for the collective, unless a rank is late
    return received.view(dist.get_world_size(group), -1).sum(0)
"""
    verdict = verdict_on(tmp_path, "direct_reduce_scatter", "waits", text)
    assert "A handle was dropped without a call to its wait(): all_to_all_single." in verdict.evidence
    assert "do you call wait() on the handle of each call" in verdict.hint
