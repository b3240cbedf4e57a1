"""The vocabulary of chapter 17: what it accepts, and what it says about the rest."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shared import ranks
from shared.placements import Equation, Link, Mesh, Partial, Replicate, Shard, as_placements, dim_of
from solutions.gspmd import MeshGroup, execute, make_mesh_group, propagate

pytestmark = pytest.mark.chapter("gspmd")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ij,jk->ik", Equation("einsum", (("i", "j"), ("j", "k")), ("i", "k"))),
        ("ij -> , i=8, j = 3", Equation("einsum", (("i", "j"),), (), {"i": 8, "j": 3})),
        ("add: ij,j->ij", Equation("add", (("i", "j"), ("j",)), ("i", "j"))),
        ("reshape: b(hd)->bhd, h=4, d=8", Equation("reshape", (("b", "hd"),), ("b", "h", "d"), {"h": 4, "d": 8})),
    ],
)
def test_equations_are_read(text, expected):
    assert Equation.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ij,jk", "write 'ij,jk->ik'"),
        ("sin: i->i", "write 'ij,jk->ik'"),
        ("i1->i", "'i1' may contain only letters"),
        ("ii->i", "the same letter twice"),
        ("i->ij", "a letter that no operand has"),
        ("relu: i,i->i", "relu takes one operand"),
        ("exp: ij->i", "only an einsum and max may drop a letter"),
        ("b(hd)->bhd, h=4, d=8", "only a reshape has parentheses"),
        ("reshape: b(hd)->bhd, h=4", "it must state the length of each letter in them"),
    ],
)
def test_what_is_no_equation_is_rejected(text, problem):
    with pytest.raises(ValueError, match="is not an equation") as raised:
        Equation.parse(text)
    assert problem in str(raised.value)


def test_dimensions_are_found_by_the_letter_that_begins_them():
    assert [dim_of(letter, ("b", "hd")) for letter in "bhd"] == [0, 1, None]


def test_placements_count_dimensions_from_the_front():
    assert as_placements(Shard(-1), 3) == (Shard(2),)
    assert as_placements([Partial(), Shard(-3)], 3) == (Partial(), Shard(0))
    with pytest.raises(ValueError, match="the tensor has 2 dimensions"):
        as_placements(Shard(2), 2)


def test_ranks_have_coordinates():
    mesh = Mesh((2, 3))
    assert [mesh.coordinates(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.shards((Shard(0), Shard(0)), 0) == 6 and mesh.shards((Shard(0), Replicate()), 1) == 1


@pytest.mark.parametrize("mesh", [4, (4,), Mesh((4,))])
def test_a_mesh_may_be_a_number_or_its_sizes(mesh):
    assert propagate("ij,jk->ik", [Shard(0), Replicate()], mesh) == (Shard(0), [])
    assert propagate("ij,jk->ik", [(Shard(0),), (Replicate(),)], mesh) == (Shard(0), [])


def test_a_mesh_needs_a_link_for_each_axis():
    with pytest.raises(ValueError, match="a mesh of 2 axes needs as many links, got 1"):
        Mesh((2, 2), (Link(),))


def test_shards_that_cannot_be_equal_are_rejected():
    with pytest.raises(ValueError, match="i = 6 cannot be divided equally into 4 shards"):
        propagate("ij,jk->ik, i=6", [Shard(0), Replicate()], 4)


def multiplied_on_a_mesh() -> list[float]:
    """Multiply on a mesh of 2 × 2 ranks, in all ways to name its groups. Returns one element of each result."""
    import torch

    device_mesh = init_device_mesh("cpu", (2, 2))
    own = make_mesh_group(Mesh((2, 2)))
    placements = [(Shard(0), Shard(1)), (Shard(0), Shard(1))]
    assert propagate("ij,jk->ik", placements, device_mesh) == propagate("ij,jk->ik", placements, (2, 2))
    x = torch.full((2, 2), 1.0 + dist.get_rank())
    every = (own, device_mesh, device_mesh.get_all_groups(), MeshGroup.of(own))
    return [execute("ij,jk->ik", [x, x], placements, each)[0, 0].item() for each in every]


@pytest.mark.slow
def test_the_groups_of_a_mesh_may_come_from_torch():
    ranks.start(4, detect_mismatch=False)
    try:
        # The matrix of the ranks' values, [[1, 2], [3, 4]], is multiplied by itself; each value stands for 2 × 2 ones.
        assert ranks.run(multiplied_on_a_mesh) == [[14.0] * 4, [20.0] * 4, [30.0] * 4, [44.0] * 4]
    finally:
        ranks.stop()
