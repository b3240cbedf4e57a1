"""The messages of the checks of chapters 00, 04 and 05 point at the mistake that was made."""

from pathlib import Path

import pytest

from shared import ranks
from shared.checks.__main__ import run_file

pytestmark = pytest.mark.slow

MUTANTS = Path(__file__).parent / "mutants"


@pytest.fixture(scope="module", autouse=True)
def two_ranks():
    ranks.start(world_size=2, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(tmp_path, module: str, piece: str, check: str, text: str, seed: int | None = None):
    path = tmp_path / "candidate.py"
    path.write_text(text)
    (verdict,) = run_file(module, path, seed, only=piece, check=check)
    assert not verdict.passed
    return verdict


@pytest.mark.parametrize("line", ["dist.send(tensor, dst=dst)", "dist.isend(tensor, dst=dst).wait()"])
def test_a_send_to_oneself_is_hinted_at(tmp_path, line):
    text = f"""
import torch.distributed as dist


def broadcast_by_hand(tensor, src):
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for dst in range(dist.get_world_size()):
        {line}
"""
    verdict = verdict_on(tmp_path, "first_collectives", "broadcast_by_hand", "values", text)
    assert "Invalid destination rank" in verdict.evidence and "not run?" in verdict.hint


QUEUE = """
class LaunchQueue:
    def __init__(self, buckets):
        self.buckets = buckets
        self.begin()

    def begin(self):
        self.missing = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        self.launched = 0

    def add(self, bucket_index, index):
        self.missing[bucket_index].remove(index)
        self.buckets[bucket_index].pack(index)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1

    def finish(self):
        for bucket_index, indices in enumerate(self.missing):
            for index in sorted(indices):
                self.add(bucket_index, index)
        for bucket in self.buckets:
            bucket.wait()
        self.begin()
"""


def test_an_error_after_a_missing_reset_names_the_round(tmp_path):
    text = QUEUE.replace("            bucket.wait()\n        self.begin()", "            bucket.wait()")
    evidence = verdict_on(tmp_path, "overlapped_ddp", "LaunchQueue", "order", text).evidence
    assert "KeyError" in evidence and ") in round 2; finish() had ended round 1 without an error.)" in evidence


def test_a_state_that_is_not_reset_is_hinted_at(tmp_path):
    text = (MUTANTS / "04_overlap" / "queue_never_begins_anew.py").read_text()
    assert "must be reset" in verdict_on(tmp_path, "overlapped_ddp", "LaunchQueue", "order", text).hint


def test_a_mistake_that_shows_in_a_later_round_is_not_taken_for_a_missing_reset(tmp_path):
    text = QUEUE.replace("        while self.launched", "        if self.launched")
    for seed in range(6):  # the first round in which the mistake shows depends on the seed
        hint = verdict_on(tmp_path, "overlapped_ddp", "LaunchQueue", "order", text, seed).hint
        assert hint == "Hint: which other bucket can be launched, now that this one has been?"


def test_an_error_of_the_queue_about_a_second_gradient_says_what_was_expected(tmp_path):
    text = """
from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        self.pending = True
        if self.enabled:
            self.queue.add(bucket_index, index)
"""
    evidence = verdict_on(tmp_path, "overlapped_ddp", "GradientSync", "second gradient", text).evidence
    assert "KeyError" in evidence and "It should raise a RuntimeError.)" in evidence


def test_a_block_that_restores_nothing_is_hinted_at(tmp_path):
    text = """
import contextlib
from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self.sync.enabled = False
        yield
"""
    hint = verdict_on(tmp_path, "overlapped_ddp", "OverlappedDDP", "no communication", text).hint
    assert "which line changes it back" in hint


BUCKETS = """
def buckets_of(gradients, cap_bytes):
    buckets = []
    for ready_s, size_bytes in gradients:
        if size_bytes <= cap_bytes:
            last = size_bytes
        buckets.append((ready_s, last))
    return buckets
"""


def test_an_error_of_the_cost_model_names_the_arguments(tmp_path):
    evidence = verdict_on(tmp_path, "scaling", "buckets_of", "buckets", BUCKETS).evidence
    assert "UnboundLocalError" in evidence and "(Your function was called with gradients=[(0." in evidence
    assert "cap_bytes=" in evidence


def test_an_error_in_an_earlier_function_points_there(tmp_path):
    text = (
        BUCKETS
        + """
def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    return min(caps_bytes, key=lambda cap: len(buckets_of(gradients, cap)))
"""
    )
    evidence = verdict_on(tmp_path, "scaling", "best_cap_bytes", "best", text).evidence
    assert "The error comes from your buckets_of. Does it pass its own check?" in evidence


@pytest.mark.parametrize(
    ("mutant", "piece", "check", "hint"),
    [
        ("fit_beta_first", "fit_alpha_beta", "values", "in which order does your function return them"),
        ("fit_in_float32", "fit_alpha_beta", "values", "in which dtype"),
        ("step_without_overlap", "predict_step_s", "values", "which buckets are in flight while backward"),
        ("buckets_empty_first_one", "buckets_of", "buckets", "to which it has not added a gradient"),
        ("efficiency_ignores_the_cap", "efficiency", "weak", "how many all-reduces does your step have"),
    ],
)
def test_a_mistake_in_the_cost_model_gets_its_own_hint(tmp_path, mutant, piece, check, hint):
    text = (MUTANTS / "05_scaling" / f"{mutant}.py").read_text()
    assert hint in verdict_on(tmp_path, "scaling", piece, check, text).hint
