"""The process groups that a probe forms end with it. The functions without `test_` run on the ranks."""

import pytest
import torch
import torch.distributed as dist

from shared import ranks
from shared.checks.engine import candidate, parcel
from shared.checks.engine.subgroups import SUBGROUPS
from shared.checks.models import awkward_models
from shared.guards.alarms import Alarm

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture
def three_ranks():
    ranks.start(3, backend="gloo:cpu")
    yield
    ranks.stop()


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


def test_groups_of_probes_do_not_pile_up(three_ranks, tmp_path):
    path = tmp_path / "work.py"
    path.write_text("piece = None\n")
    first = groups_after(1, str(path))
    assert groups_after(3, str(path)) == first
    with ranks.world(3):  # a new generation, in which the groups of the last probe are gone
        assert groups_after(1, str(path)) == first


def test_no_name_of_a_group_comes_back(three_ranks, tmp_path):
    """gloo finds the other ranks under the group's name in the store, where the addresses of the last group remain."""
    path = tmp_path / "work.py"
    path.write_text("piece = None\n")
    names = [run_probe(probe, str(path))[0] for probe in 2 * [split_a_group, split_a_group, form_a_group]]
    split = [name for name in names if isinstance(name, str)]
    assert len(set(split)) == len(split) == 4


def test_a_report_counts_what_guards_send_unseen(three_ranks, tmp_path):
    """Otherwise, a grader that measures the network takes their bytes for a hidden message, if a probe is repeated."""
    path = tmp_path / "work.py"
    path.write_text("piece = None\n")
    width = awkward_models.USUAL_WIDTH
    found = ranks.run(candidate.probe, ("piece",), str(path), compare_three_times, (), width)
    assert [report for _, report in found] == [(0, 0, 3)] * 3
