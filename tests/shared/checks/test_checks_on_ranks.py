"""What the checks do on ranks: groups end with their probe, prints are shown, and wrappers may send in backward()."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shared import ranks
from shared.checks.engine import candidate, parcel
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Unusable, Wrong
from shared.checks.engine.framework import MOST_LINES, CheckFailed, Exercise, Prints
from shared.checks.engine.subgroups import SUBGROUPS
from shared.checks.engine.training import Training, train_and_judge
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.manual_ddp.sampler import every_sample_once_and_equal_shares
from shared.checks.models import awkward_models
from shared.guards.alarms import Alarm
from shared.ranks import magic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def three_ranks():
    ranks.start(3, backend="gloo:cpu", detect_mismatch=False)
    yield
    ranks.stop()


# -- the process groups that a probe forms end with it. The functions without `test_` run on the ranks.


@pytest.fixture
def solution(tmp_path) -> str:
    path = tmp_path / "work.py"
    path.write_text("piece = None\n")
    return str(path)


def form_a_group(piece) -> int:
    """Form a subgroup and use it. Returns how many groups this rank had before."""
    before = len(dist.distributed_c10d._world.pg_map)
    members = SUBGROUPS[3][0]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        dist.all_reduce(torch.ones(1), group=group)
    return before


def split_a_group(piece) -> str:
    """Form a group as a mesh of two dimensions does with NCCL, which names it by its ranks. Returns its name."""
    group = dist.new_group([0, 1, 2], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)
    return group.group_name


def compare_three_times(piece) -> None:
    for _ in range(3):
        Alarm().compare(["the same model"], torch.device("cpu"))


def run_probe(probe, path: str) -> list:
    found = ranks.run(candidate.probe, ("piece",), path, probe, (), awkward_models.USUAL_WIDTH)
    return [parcel.unpack(packed) for packed, _ in found]


def groups_after(times: int, path: str) -> list[int]:
    """Run the probe several times. Returns how many groups each rank had when the last one began."""
    return [run_probe(form_a_group, path) for _ in range(times)][-1]


@pytest.mark.exhaustive
def test_groups_of_probes_do_not_pile_up(solution):
    first = groups_after(1, solution)
    assert groups_after(3, solution) == first
    with ranks.world(3):  # a new generation, in which the groups of the last probe are gone
        assert groups_after(1, solution) == first


@pytest.mark.exhaustive
def test_no_name_of_a_group_comes_back(solution):
    """gloo finds the other ranks under the group's name in the store, where the addresses of the last group remain."""
    names = [run_probe(probe, solution)[0] for probe in 2 * [split_a_group, split_a_group, form_a_group]]
    split = [name for name in names if isinstance(name, str)]
    assert len(set(split)) == len(split) == 4


@pytest.mark.exhaustive
def test_a_report_counts_what_guards_send_unseen(solution):
    """Otherwise, a grader that measures the network takes their bytes for a hidden message, if a probe is repeated."""
    width = awkward_models.USUAL_WIDTH
    found = ranks.run(candidate.probe, ("piece",), solution, compare_three_times, (), width)
    assert [report for _, report in found] == [(0, 0, 3)] * 3


# -- what a check prints besides its verdicts: a few lines of what the code printed, and what is missing


def call(piece):
    return piece()


def pass_(attempt) -> None:
    attempt.run(call)


def fail(attempt) -> None:
    attempt.run(call)
    raise Wrong("it is wrong")


def test_prints_of_the_failed_check_are_shown_but_no_warnings(capsys):
    exercise = Exercise("9.9", "talks")
    exercise.check("first", world_sizes=(1, 2))(pass_)
    exercise.check("second", world_sizes=(2,))(fail)
    magic.cell("", "import warnings\ndef talks():\n    print('size', world_size)\n    warnings.warn('deprecated')")
    with pytest.raises(CheckFailed, match=r"failed \(second\)\. second: it is wrong$"):
        exercise()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Your code printed this in the check “second”, on 2 ranks:",
        "ranks 0, 1 │ size 2",
    ]


def test_prints_of_passed_checks_are_shown_once(capsys):
    exercise = Exercise("9.9", "talks")
    exercise.check("first", world_sizes=(1, 2))(pass_)
    magic.cell("", "def talks(): print('size', world_size)")
    exercise()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Your code printed this in the check “first”, on 1 rank:",
        "rank 0 │ size 1",
    ]


def test_a_check_says_that_a_piece_is_not_defined_on_the_ranks():
    exercise = Exercise("9.9", "not_yet_run")
    exercise.check("first", world_sizes=(1, 2))(pass_)
    with pytest.raises(Unusable, match="not_yet_run is not defined on the ranks: run the %%ranks cell"):
        exercise()


def test_many_lines_are_cut(capsys):
    prints = Prints()
    prints.show()
    prints.add("values", 2, {0: "line\n" * 30, 1: "line\n" * 30}, failed=True)
    prints.show()
    _title, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["ranks 0, 1 │ line"] * MOST_LINES + ["ranks 0, 1 │ … 18 more lines not shown"]


# -- wrappers get options, and may send in backward()

SENDS_IN_BACKWARD = """
import copy

import torch
import torch.distributed as dist
from torch import nn


class Wrapper(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        if bucket_cap_mb != 0.001:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}")
        self.module, self.cap, self.group, self.sent = module, bucket_cap_mb, group, set()
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def __deepcopy__(self, memo):
        return Wrapper(copy.deepcopy(self.module, memo), self.cap, self.group)

    def _average(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= dist.get_world_size(self.group)
        self.sent.add(parameter)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self.sent:
                parameter.grad = torch.zeros_like(parameter)
                self._average(parameter)
        self.sent.clear()
"""
CAP = {"bucket_cap_mb": 0.001}
SAMPLER = """
from solutions import manual_ddp as right


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        whole = right.ShardedSampler(self.length, 0, 1, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        order += order[: len(self) * self.world_size - self.length]
        return iter(order[self.rank :: self.world_size])
"""


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    path = tmp_path / "candidate.py"
    path.write_text(SENDS_IN_BACKWARD)
    return Attempt("Wrapper", str(path), 3, random.Random(5))


@pytest.mark.parametrize(
    "how",
    [
        Training("Tied", options=CAP, overlaps=True),
        Training("Unused", options=CAP, overlaps=True),
        Training("Plain", options=CAP, overlaps=True, in_subgroup=True),
        Training("Plain", options=CAP, overlaps=True, dtype=torch.bfloat16),
    ],
    ids=["tied", "unused", "subgroup", "bf16"],
)
def test_a_wrapper_that_sends_in_backward_is_right(attempt, how):
    for step in train_and_judge(attempt, how)[-1].steps:
        assert step.working, "nothing was sent in backward()"


def test_a_wrapper_that_sends_in_backward_behaves_like_its_module(attempt):
    judge_wrapping(attempt, CAP, overlaps=True)


def test_options_reach_the_constructor(attempt):
    with pytest.raises(Wrong, match="bucket_cap_mb is 7"):
        train_and_judge(attempt, Training("Plain", options={"bucket_cap_mb": 7}))


def test_a_collective_over_all_ranks_instead_of_the_group_is_hinted_at(attempt):
    Path(attempt.path).write_text(SENDS_IN_BACKWARD.replace("tensor.detach(), group=group, group_src", "tensor, src"))
    with pytest.raises(Wrong, match="wait in broadcast #1") as caught:
        train_and_judge(attempt, Training("Plain", options=CAP, overlaps=True, in_subgroup=True))
    assert "Which call in your code leaves out the group?" in caught.value.hint


def test_the_hint_on_unequal_shares_names_the_case(attempt):
    Path(attempt.path).write_text(SAMPLER)
    sampler = replace(attempt, piece="ShardedSampler")
    with pytest.raises(Wrong, match=r"^for 1 sample, the ranks yield \[1, 1, 0\] indices; expected 1 each$") as caught:
        every_sample_once_and_equal_shares(sampler)
    assert "fewer samples than ranks" in caught.value.hint
