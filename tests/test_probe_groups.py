"""The process groups that a probe forms end with it. The functions without `test_` run on the ranks."""

import pytest
import torch
import torch.distributed as dist

from shared import ranks
from shared.checks.engine import candidate, parcel
from shared.checks.engine.subgroups import SUBGROUPS

pytestmark = pytest.mark.slow


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


def groups_after(times: int, path: str) -> list[int]:
    """Run the probe several times. Returns how many groups each rank had when the last one began."""
    for _ in range(times):
        packed = ranks.run(candidate.probe, ("piece",), path, form_a_group, ())
    return [parcel.unpack(each) for each in packed]


def test_groups_of_probes_do_not_pile_up(three_ranks, tmp_path):
    path = tmp_path / "work.py"
    path.write_text("piece = None\n")
    first = groups_after(1, str(path))
    assert groups_after(3, str(path)) == first
    with ranks.world(3):  # a new generation, in which the groups of the last probe are gone
        assert groups_after(1, str(path)) == first
