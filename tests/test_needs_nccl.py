"""Notebooks that need NCCL on GPUs are found in their sources."""

import pytest

from tests.needs_nccl import check_needs_nccl, needs_nccl, uses_a_mesh, uses_point_to_point


@pytest.mark.parametrize(
    "source",
    [
        "dist.send(tensor, dst=1)",
        "work = torch.distributed.irecv(tensor, src=0)",
        "from torch.distributed import isend",
        "calls = [dist.P2POp(dist.isend, tensor, 1)]",
        "from solutions.collectives import ring_reduce_scatter",  # it calls ring_step, which sends
        "from solutions import collectives\ncollectives.tree_broadcast(tensor)",
    ],
)
def test_sending_is_found(source):
    assert uses_point_to_point(source) and needs_nccl(source)


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_reduce(tensor)",
        "bucket.send()",
        "send = 'dist.send'",
        "from solutions.async_collectives import launch_reduce_scatter",  # on a GPU, it uses the backend's collective
        "from solutions.collectives import gather_shards",
    ],
)
def test_collectives_are_not_mistaken_for_sending(source):
    assert not uses_point_to_point(source)


@pytest.mark.parametrize(
    "source", ["mesh = init_device_mesh('cuda', (4,))", "from solutions.production import host_mesh"]
)
def test_meshes_are_found(source):
    assert uses_a_mesh(source) and needs_nccl(source)


def test_meshes_of_checks_are_found():
    """Lab 12 creates no mesh, but its checks shard models with fully_shard."""
    assert check_needs_nccl("checkpoints") and needs_nccl("from shared.checks import checkpoints as check")
    assert not check_needs_nccl("zero1") and not needs_nccl("from shared.checks import zero1 as check")
