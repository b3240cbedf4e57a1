"""Chapter 17: `shared.spmd` reads which collectives there really are, and `shared.placements` rejects what is none."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shared import ranks, spmd
from shared.deadlines import scaled
from shared.placements import Equation, Link, Mesh, Partial, Replicate, Shard, as_placements, dim_of
from shared.spmd import hlo
from solutions.gspmd import MeshGroup, execute, make_mesh_group, propagate

pytestmark = pytest.mark.chapter("gspmd")
slow = pytest.mark.slow  # importing JAX takes a second

ROOT = Path(__file__).parents[2]
ROWS = [list(range(8 * row, 8 * row + 8)) for row in range(4)]  # of a mesh of 4 × 8 devices
COLUMNS = [list(range(column, 32, 8)) for column in range(8)]


def line(groups: str, result: str = "f32[256,64]{1,0}", op: str = "all-reduce") -> str:
    return f"  ROOT %it.1 = {result} {op}(%param), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add"


# -- reading a line


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={}", [list(range(32))]),
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[4,8]<=[32]", ROWS),
        ("replica_groups=[8,4]<=[4,8]T(1,0)", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_1'}", ROWS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0'}", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0','axis_1'}", [list(range(32))]),
        (
            "replica_groups=mesh['axis_0'=1,'axis_1'=8,'axis_2'=4], device_ids=([4,8]T(1,0)) {'axis_1'}",
            ROWS,
        ),
    ],
)
def test_every_way_to_write_groups_is_understood(written, groups):
    (found,) = hlo.collectives(line(written), devices=32)
    assert found.groups == groups


@pytest.mark.parametrize(
    "written",
    [
        "replica_groups=something_new",
        "replica_groups=mesh['axis_0'=32] {'axis_0':(2)4}",
        "replica_groups=mesh['axis_0'=4,'axis_1'=8], device_ids=(7,6,5) {'axis_1'}",
    ],
)
def test_an_unknown_way_is_an_error_and_not_a_wrong_answer(written):
    with pytest.raises(ValueError, match="written in an unknown way: ROOT %it"):
        hlo.collectives(line(written), devices=32)


def test_a_program_for_a_gpu_is_rejected():
    with pytest.raises(ValueError, match="not compiled for a CPU: it launches all-gather-start"):
        hlo.collectives(line("replica_groups={}", op="all-gather-start"), devices=2)


def test_sizes_are_those_of_the_full_buffer():
    groups = "replica_groups={{0,1,2,3}}"
    (scattered,) = hlo.collectives(line(groups, "bf16[8,2]{1,0}", "reduce-scatter"), 4)
    assert (scattered.elements, scattered.payload_bytes) == (64, 128)
    packed = "(f32[64]{0}, pred[], /*index=5*/f64[2,3]{1,0})"
    (reduced,) = hlo.collectives(line(groups, packed), 4)
    assert (reduced.elements, reduced.payload_bytes, reduced.tensors) == (71, 4 * 64 + 1 + 8 * 6, 3)
    (exchanged,) = hlo.collectives(line(groups, "(s8[4]{0}, s8[4]{0})", "all-to-all"), 4)
    assert (exchanged.elements, exchanged.tensors) == (8, 1)


def test_other_lines_are_not_collectives():
    program = "%fused = f32[4]{0} fusion(%all-reduce.3), kind=kLoop\n%all-gather (x: f32[2]) {"
    assert hlo.collectives(program, devices=4) == []


# -- reading a program


@pytest.fixture(scope="module")
def mesh():
    import jax
    from jax.sharding import AxisType

    spmd.virtual_devices(32)
    return jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def manual(mesh, function):
    """Compile a function that sees a device's own part, 64 × 64 elements, of an array that is split along x and y."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    array = jax.ShapeDtypeStruct((4 * 64, 8 * 64), np.float32, sharding=NamedSharding(mesh, P("x", "y")))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    return jax.jit(mapped).lower(array).compile()


@slow
@pytest.mark.parametrize(("axes", "size"), [("x", 4), ("y", 8), ("x, y", 32)])
def test_collectives_by_hand_are_found_with_their_axes_and_bytes(mesh, axes, size):
    from jax import lax

    names, own_bytes, f = tuple(axes.split(", ")), 4 * 64 * 64, (size - 1) / size
    expected = {
        "all_reduce": (lambda x: lax.psum(x, names), own_bytes, 2 * f * own_bytes),
        "all_gather": (partial(lax.all_gather, axis_name=names, tiled=True), size * own_bytes, f * size * own_bytes),
        "reduce_scatter": (partial(lax.psum_scatter, axis_name=names, tiled=True), own_bytes, f * own_bytes),
        "all_to_all": (
            lambda x: lax.all_to_all(x, names, split_axis=0, concat_axis=1, tiled=True),
            own_bytes,
            f * own_bytes,
        ),
        "collective_permute": (
            lambda x: lax.ppermute(x, names, [(rank, (rank + 1) % size) for rank in range(size)]),
            own_bytes,
            own_bytes,
        ),
    }
    for op, (function, payload_bytes, sent_bytes) in expected.items():
        (found,) = spmd.of_program(manual(mesh, function), mesh)
        assert (found.op, found.axes, found.payload_bytes) == (op, axes, payload_bytes)
        assert found.sent_bytes == pytest.approx(sent_bytes) and found.elements == payload_bytes // 4


@slow
def test_a_program_without_communication_has_none(mesh):
    assert spmd.of_program(manual(mesh, lambda x: 2 * x), mesh) == []


@slow
def test_the_number_of_devices_cannot_change(mesh):
    assert len(spmd.virtual_devices(32)) == 32
    with pytest.raises(RuntimeError, match="JAX has already started with 32 devices: restart the kernel to get 8"):
        spmd.virtual_devices(8)


# -- comparing


def test_programs_are_compared_by_axis_and_kind():
    reduced = spmd.Collective("all_reduce", "tp", 1_600, 6_400, 6_400.0)
    packed = spmd.Collective("all_reduce", "dp", 800, 3_200, 3_200.0, tensors=2)
    gathered = spmd.Collective("all_gather", "tp", 400, 1_600, 800.0)
    table = spmd.side_by_side({"a": [reduced, reduced, packed], "b": [gathered]}, {6_400: "weight"})
    assert table.header == ["axis", "collective", "a", "b"]
    assert table.rows == [
        ["", "a rank sends, kB", "16.0", "0.8"],
        ["tp", "all_reduce", "2 × 6.4 (weight)", "–"],
        ["tp", "all_gather", "–", "1.6"],
        ["dp", "all_reduce", "3.2 (2 tensors)", "–"],
    ]


def in_groups():
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shared import spmd, wire

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    with wire.ledger() as log:
        dist.all_reduce(torch.ones(8), group=groups["dp"])
        dist.all_reduce(torch.ones(4, dtype=torch.float64), group=groups["tp"])
    found = spmd.of_ledger(log, groups)
    try:
        spmd.of_ledger(log, {"dp": groups["dp"]})
    except ValueError as error:
        return found, str(error)


@slow
def test_a_ledger_names_the_axis_of_each_collective(four_ranks):
    for found, error in four_ranks.run(in_groups):
        assert [(each.op, each.axes, each.payload_bytes) for each in found] == [
            ("all_reduce", "dp", 32),
            ("all_reduce", "tp", 32),
        ]
        assert "is in none of the groups ['dp']" in error


# -- placements: what is accepted, and what is said about the rest


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


def test_placements_count_dimensions_from_the_front():
    assert [dim_of(letter, ("b", "hd")) for letter in "bhd"] == [0, 1, None]  # found by the letter that begins them
    assert as_placements(Shard(-1), 3) == (Shard(2),)
    assert as_placements([Partial(), Shard(-3)], 3) == (Partial(), Shard(0))
    with pytest.raises(ValueError, match="the tensor has 2 dimensions"):
        as_placements(Shard(2), 2)


def test_ranks_have_coordinates():
    mesh = Mesh((2, 3))
    assert [mesh.coordinates(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.shards((Shard(0), Shard(0)), 0) == 6 and mesh.shards((Shard(0), Replicate()), 1) == 1


@pytest.mark.parametrize("same", [4, (4,), Mesh((4,))])
def test_a_mesh_may_be_a_number_or_its_sizes(same):
    assert propagate("ij,jk->ik", [Shard(0), Replicate()], same) == (Shard(0), [])
    assert propagate("ij,jk->ik", [(Shard(0),), (Replicate(),)], same) == (Shard(0), [])


def test_meshes_and_shards_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="a mesh of 2 axes needs as many links, got 1"):
        Mesh((2, 2), (Link(),))
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


@slow
def test_the_groups_of_a_mesh_may_come_from_torch(four_ranks):
    # The matrix of the ranks' values, [[1, 2], [3, 4]], is multiplied by itself; each value stands for 2 × 2 ones.
    assert ranks.run(multiplied_on_a_mesh) == [[14.0] * 4, [20.0] * 4, [30.0] * 4, [44.0] * 4]


# -- JAX beside the ranks

BOTH = """
import jax
from shared import ranks, spmd
from shared.ranks.errors import RanksError

def has_jax():
    import sys
    from shared import spmd
    return "jax" in sys.modules

def end():
    import os
    os._exit(1)

def total():
    return float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((64, 64))))

spmd.virtual_devices(32)
assert total() == 64**3
ranks.start(2)
assert ranks.run(has_jax) == [False, False]
assert total() == 64**3
try:
    ranks.run(end)
except RanksError:
    print("a rank ended")
assert ranks.run(has_jax) == [False, False]
assert total() == 64**3
ranks.stop()
print("both work")
"""


@slow
def test_ranks_and_jax_do_not_disturb_each_other():
    """JAX warns if its process forks, and a fork may then hang. Ranks are forked elsewhere, also when they restart."""
    command = [sys.executable, "-W", "always", "-c", BOTH]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(120))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "both work" and "a rank ended" in ran.stdout
    assert "fork" not in ran.stderr
