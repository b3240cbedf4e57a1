"""`python -m shared.checks NAME FILE` exits with 0 if all checks pass, 1 if some fail, or 2 with a reason."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import ranks
from shared.checks.__main__ import main, run_file
from shared.checks.engine import failures
from shared.deadlines import scaled
from tests import mutants

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
VARIANTS = ROOT / "tests" / "variants"
SUMMED = """
import torch.distributed as dist


def mean_over_ranks_(tensor, group=None):
    dist.all_reduce(tensor, group=group)
"""  # not divided by the number of ranks


UNDIVIDED_BUCKET = """
class Bucket:
    def __init__(self, parameters, group=None):
        self.parameters, self.buffer = parameters, parameters[0].new_zeros(sum(each.numel() for each in parameters))
"""


@pytest.fixture(scope="module")
def four_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


@pytest.fixture
def check(four_ranks, monkeypatch, capsys):
    """Return a function that calls main() on the module's ranks. It returns the exit status and what is printed."""
    monkeypatch.setattr(ranks, "stop", lambda: None)

    def check(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["checks", *map(str, arguments)])
        return main(), capsys.readouterr().out

    return check


@pytest.mark.exhaustive
def test_a_right_solution_exits_0_with_its_verdicts_in_json(check):
    status, printed = check("first_collectives", VARIANTS / "00_ranks" / "odd_even_and_tree.py", "--json")
    report = json.loads(printed)
    assert status == 0 and report["status"] == 0
    assert all(verdict["passed"] for verdict in report["verdicts"]) and len(report["verdicts"]) >= 8


@pytest.mark.exhaustive
def test_a_wrong_solution_exits_1_with_evidence_and_a_hint(check, tmp_path):
    status, printed = check("first_collectives", mutants.named("00_ranks", "log_the_sum").write(tmp_path))
    assert status == 1
    assert "✗ log_mean_loss · values" in printed
    assert "times too large" in printed and "sum or the mean?" in printed


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("module", "pieces"),
    [("manual_ddp", "mean_over_ranks_, broadcast_state,"), ("production", "fully_sharded, host_mesh,")],
)
def test_a_file_without_any_piece_exits_2_with_a_reason(check, tmp_path, module, pieces):
    path = tmp_path / "candidate.py"
    path.write_text("x = 1\n")
    status, printed = check(module, path)
    assert status == 2
    assert printed.startswith(f"unusable: candidate.py defines none of: {pieces}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("raise SystemExit(0)\n", "does not load"),
        ("import os\nos._exit(0)\n", "died"),
    ],
)
def test_a_file_that_does_not_load_is_unusable_and_the_ranks_survive(four_ranks, tmp_path, text, why):
    path = tmp_path / "candidate.py"
    path.write_text(text)
    with pytest.raises(failures.Unusable, match=why):
        run_file("manual_ddp", path)
    assert ranks.run(int) == [0] * 4


@pytest.fixture
def summed(tmp_path) -> Path:
    path = tmp_path / "candidate.py"
    path.write_text(SUMMED)
    return path


def test_a_seed_repeats_a_run(four_ranks, summed):
    first, second = (run_file("manual_ddp", summed, seed=5, only="mean_over_ranks_") for _ in range(2))
    assert first == second and not first[0].passed


def test_one_check_of_one_piece_can_be_run(four_ranks, summed):
    (verdict,) = run_file("manual_ddp", summed, only="mean_over_ranks_", check="wire")
    assert (verdict.exercise, verdict.check) == ("mean_over_ranks_", "wire")
    assert verdict.passed and verdict.world_sizes == (2, 4), "a sum sends as many bytes as a mean"


def test_a_piece_imported_from_the_solutions_fails(four_ranks, tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text("from solutions.manual_ddp import ManualDDP\n")
    verdicts = run_file("manual_ddp", path, only="ManualDDP")
    assert not any(verdict.passed for verdict in verdicts)
    assert "write it by hand" in verdicts[0].evidence


IMPORTS = {
    "nothing": "",
    "by name": "from solutions.manual_ddp import ManualDDP, broadcast_state\n\n",
    "everything, or else nothing": "try:\n    from solutions.manual_ddp import *\nexcept ImportError:\n    pass\n",
    "the module": "import solutions.manual_ddp as ours\nManualDDP = ours.ManualDDP\n",
}


@pytest.mark.parametrize("how", IMPORTS)
def test_only_what_a_file_builds_itself_is_checked(four_ranks, tmp_path, how):
    """It may be one exercise of several. Pieces that it lacks, or imports from solutions/, are skipped."""
    path = tmp_path / "candidate.py"
    path.write_text(IMPORTS[how] + SUMMED)
    assert {verdict.exercise for verdict in run_file("manual_ddp", path)} == {"mean_over_ranks_"}


def test_a_piece_of_an_earlier_lab_stands_for_ours(four_ranks, tmp_path, capsys):
    """Lab 03 allows a Bucket that divides in wait(); a compressor that is built on it would not divide at all."""
    source = (ROOT / "solutions" / "compression.py").read_text().replace("(FlatBucket)", "(Bucket)")
    path = tmp_path / "candidate.py"
    path.write_text(source.replace("class FlatBucket", f"{UNDIVIDED_BUCKET}\n\nclass FlatBucket"))
    verdicts = run_file("compression", path, only="TopK", check="one bucket")
    assert [verdict.passed for verdict in verdicts] == [True]
    assert "Bucket is a piece of an earlier lab, so ours is used" in capsys.readouterr().out


def test_our_own_solution_may_consist_of_several_modules(four_ranks):
    (verdict,) = run_file("zero3", ROOT / "solutions" / "zero3.py", only="GradientReducer", check="plain backward")
    assert verdict.passed, verdict.evidence


def test_the_placeholder_of_a_lab_is_reported_as_not_written(four_ranks, tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text("def mean_over_ranks_(tensor, group=None):\n    raise NotImplementedError('your code here')\n")
    verdicts = run_file("manual_ddp", path, only="mean_over_ranks_")
    assert all(verdict.evidence == "it is not written yet" for verdict in verdicts)


def test_another_not_implemented_error_is_reported_with_its_message(four_ranks, tmp_path):
    """torch raises this error for operators that do not support DTensors."""
    text = "def mean_over_ranks_(*arguments):\n    raise NotImplementedError('no sharding strategy registered')\n"
    (tmp_path / "theirs.py").write_text(text)
    for verdict in run_file("manual_ddp", tmp_path / "theirs.py", only="mean_over_ranks_"):
        assert not verdict.passed and "no sharding strategy registered" in verdict.evidence


@pytest.mark.parametrize("arguments", [("no_such_module", __file__), ("manual_ddp", "no_such_file.py")])
def test_a_wrong_name_exits_2_in_one_sentence(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checks", *arguments])
    assert main() == 2
    output = capsys.readouterr().out
    assert output.startswith("unusable: there ") and len(output.splitlines()) == 1


def test_a_name_that_only_cells_have_is_explained(four_ranks, tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text("def global_mean(values):\n    return rank\n")
    values, *others = run_file("first_collectives", path, only="global_mean")
    assert "rank = dist.get_rank()" in values.hint
    assert others and not any(verdict.ran for verdict in others), "they run when “values” passes"
    path.write_text("x = torch.ones(1)\n")
    with pytest.raises(failures.Unusable, match="define it yourself, for example: `import torch`"):
        run_file("first_collectives", path)


def test_a_rank_that_returns_without_sending_is_named(four_ranks, tmp_path):
    path = tmp_path / "candidate.py"
    text = "import torch.distributed as dist\ndef broadcast_by_hand(tensor, src):\n"
    path.write_text(text + "    dist.get_rank() == src or dist.recv(tensor, src=src)\n")
    values, _ = run_file("first_collectives", path, only="broadcast_by_hand")
    assert values.hint == "Hint: which line of your function should make rank 0 send? Or should rank 1 not receive?"


def test_an_error_in_a_group_is_not_taken_for_a_transfer_in_flight(four_ranks, tmp_path):
    path = tmp_path / "candidate.py"
    text = "import torch, torch.distributed as dist\ndef direct_reduce_scatter(tensor, group=None):\n"
    text += "    dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)\n"
    path.write_text(text + "    return tensor.view(dist.get_world_size(group), -1).sum(0)\n")
    (group,) = run_file("collectives", path, only="direct_reduce_scatter", check="group")
    # torch 2.13 lets the all-to-all run and fails in view(); torch 2.14 rejects it.
    assert re.search("invalid for input of size 11|does not divide", group.evidence), group.evidence
    assert "in flight" not in group.evidence


@pytest.mark.exhaustive
def test_a_watched_file_is_checked_again_when_it_is_saved(tmp_path):
    """This runs `python -m shared.checks`, which starts ranks of its own."""
    path = tmp_path / "mine.py"
    path.write_text(SUMMED)
    command = [sys.executable, "-u", "-m", "shared.checks", "manual_ddp", str(path), "--watch"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        before = _until_it_waits(process)
        path.write_text(SUMMED + "    tensor.div_(dist.get_world_size(group))\n")
        after = _until_it_waits(process)
        path.write_text(path.read_text())  # saved without a change
        with path.open("w") as file:  # saved in two steps
            file.write(SUMMED)
            file.flush()
            time.sleep(0.2)
            file.write("    tensor.div_(dist.get_world_size(group))\n\n")
        again = _until_it_waits(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(30)) == 0  # the status of the last check
    finally:
        process.kill()
    assert "✗ mean_over_ranks_ · values" in before and "✗" not in after and "✓ mean_over_ranks_ · values" in after
    lines = [text.splitlines() for text in (after, again)]
    assert lines[0] and all(len(text) == len(set(text)) for text in lines)  # one report each


def _until_it_waits(process: subprocess.Popen) -> str:
    lines = []
    while not lines or not lines[-1].startswith("Waiting until you save"):
        lines.append(process.stdout.readline())
        assert lines[-1], "it has ended"
    return "".join(lines)
