"""Tests that need a CUDA GPU (`pytest -m gpu`): NCCL with a GPU per rank and on shared GPUs, and gloo."""

from pathlib import Path

import pytest
import torch

from shared import ranks
from shared.checks.__main__ import run_file
from shared.ranks import devices
from tests import mutants

needs_sharing = pytest.mark.skipif(
    bool(torch.cuda.device_count() and devices.why_not_shared(torch.cuda.device_count(), 2)),
    reason="this NCCL cannot share a GPU",
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]

VARIANT = Path(__file__).parents[1] / "variants" / "02_manual_ddp" / "all_in_flight.py"


@pytest.fixture(autouse=True)
def no_ranks_left():
    yield
    ranks.stop()


def _sum_on_the_device() -> tuple[str, float]:
    import torch.distributed as dist

    from shared.ranks import rankside

    tensor = torch.full((4,), dist.get_rank() + 1.0, device=rankside.here.device)
    dist.all_reduce(tensor)
    return str(tensor.device), tensor[0].item()


def test_with_a_gpu_per_rank_nccl_is_chosen():
    count = torch.cuda.device_count()
    ranks.start(world_size=count)
    assert "nccl" in ranks.current().placement.backend
    total = count * (count + 1) / 2
    assert ranks.run(_sum_on_the_device) == [(f"cuda:{rank}", total) for rank in range(count)]


def test_with_fewer_gpus_ranks_share_them_if_nccl_is_new_enough_and_run_on_the_cpu_otherwise():
    count = torch.cuda.device_count()
    size = count + 1
    ranks.start(world_size=size)
    placement = ranks.current().placement
    if why := devices.why_not_shared(count, size):
        assert f"The ranks run on the CPU, because {why}" in placement.valid
        expected = ["cpu"] * size
    else:
        assert placement.backend == devices.NCCL and "ranks share a GPU over NCCL" in placement.valid
        expected = [f"cuda:{rank % count}" for rank in range(size)]
    assert ranks.run(_sum_on_the_device) == [(device, size * (size + 1) / 2) for device in expected]


def _where_and_memory_fraction() -> tuple[str, float]:
    from shared import measure

    share = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.empty(int(0.95 * share), dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return measure.where(), True
    return measure.where(), False


@needs_sharing
def test_ranks_that_share_a_gpu_have_a_share_of_its_memory_and_mark_their_times():
    ranks.start(world_size=2 * torch.cuda.device_count(), backend="nccl:shared")
    for where, out_of_memory in ranks.run(_where_and_memory_fraction):
        assert where.startswith("over NCCL, where 2 ranks use one GPU") and out_of_memory


@needs_sharing
def test_a_rank_that_is_killed_on_a_shared_gpu_is_replaced():
    ranks.start(world_size=2 * torch.cuda.device_count(), backend="nccl:shared")
    size = ranks.current().world_size

    def dies():
        import os
        import signal

        import torch.distributed as dist

        x = torch.ones(1 << 24, device="cuda")
        for _ in range(20):
            dist.all_reduce(x)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.cuda.synchronize()

    with pytest.raises(ranks.CellFailed, match="Rank 1"):
        ranks.run(dies)
    assert [total for _, total in ranks.run(_sum_on_the_device)] == [size * (size + 1) / 2] * size


def test_ranks_share_gpus_through_gloo_on_request_for_collectives_only():
    size = torch.cuda.device_count() + 1
    ranks.start(world_size=size, backend="gloo")
    found = ranks.run(_sum_on_the_device)
    assert {device for device, _ in found} == {f"cuda:{index}" for index in range(size - 1)}
    assert [total for _, total in found] == [size * (size + 1) / 2] * size

    def send_to_the_right():
        import torch.distributed as dist

        from shared.ranks import rankside

        dist.isend(torch.ones(1, device=rankside.here.device), (dist.get_rank() + 1) % dist.get_world_size())

    with pytest.raises(ranks.CellFailed, match="gloo cannot send a tensor on cuda"):
        ranks.run(send_to_the_right)


def _time_of_a_kernel_s() -> float:
    from shared import measure

    return measure.jobs({"": lambda: torch.cuda._sleep(50_000_000)}, rounds=3)[""].fastest_s


def test_time_of_a_job_includes_the_work_that_it_only_launches():
    """The call returns within microseconds. The kernel spins for 50 million cycles: 20 ms at 2.5 GHz."""
    ranks.start(world_size=torch.cuda.device_count())
    assert min(ranks.run(_time_of_a_kernel_s)) > 0.01


def test_a_hang_with_tensors_on_the_gpu_is_explained_and_healed():
    ranks.start(world_size=torch.cuda.device_count() + 1, backend="gloo")

    def rank_0_alone():
        import torch.distributed as dist

        if dist.get_rank() == 0:
            _sum_on_the_device()

    with pytest.raises(ranks.CellFailed, match="all_reduce"):
        ranks.run(rank_0_alone)
    assert len(ranks.run(_sum_on_the_device)) == ranks.current().world_size


def test_out_of_memory_on_one_rank_is_reported_and_the_next_cell_works():
    ranks.start(world_size=1)

    def too_much():
        torch.empty(1 << 50, device="cuda")

    with pytest.raises(ranks.CellFailed, match=r"Rank 0 failed.*out of memory") as caught:
        ranks.run(too_much)
    assert "Its tensors hold 0.00 GB of" in caught.value.message
    assert ranks.run(_sum_on_the_device)[0][1] == 1.0


@pytest.mark.parametrize(
    ("size", "backend"), [(1, "nccl"), (4, "gloo"), pytest.param(4, "nccl:shared", marks=needs_sharing)]
)
def test_checks_pass_a_right_solution_and_fail_a_wrong_one_on_the_gpu(tmp_path, size, backend):
    ranks.start(world_size=size, backend=backend, detect_mismatch=False)
    assert all(verdict.passed for verdict in run_file("manual_ddp", VARIANT))
    if size > 2:
        mutant = mutants.named("02_manual_ddp", "divides_by_the_world").write(tmp_path)
        verdicts = run_file("manual_ddp", mutant, only="mean_over_ranks_")
        assert [verdict.check for verdict in verdicts if not verdict.passed] == ["group"]
