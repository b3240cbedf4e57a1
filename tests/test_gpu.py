"""Tests that need a CUDA GPU (`pytest -m gpu`): NCCL with one GPU per rank, and gloo on shared GPUs."""

from pathlib import Path

import pytest
import torch

from shared import ranks
from shared.checks.__main__ import run_file

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]

VARIANT = Path(__file__).parent / "variants" / "02_manual_ddp" / "all_in_flight.py"
MUTANT = Path(__file__).parent / "mutants" / "02_manual_ddp" / "divides_by_the_world.py"


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


def test_with_fewer_gpus_ranks_run_on_the_cpu():
    size = torch.cuda.device_count() + 1
    ranks.start(world_size=size)
    assert "The ranks run on the CPU, because" in ranks.current().placement.valid
    assert ranks.run(_sum_on_the_device) == [("cpu", size * (size + 1) / 2)] * size


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


@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (4, "gloo")])
def test_checks_pass_a_right_solution_and_fail_a_wrong_one_on_the_gpu(size, backend):
    ranks.start(world_size=size, backend=backend, detect_mismatch=False)
    assert all(verdict.passed for verdict in run_file("manual_ddp", VARIANT))
    if size > 2:
        verdicts = run_file("manual_ddp", MUTANT, only="mean_over_ranks_")
        assert [verdict.check for verdict in verdicts if not verdict.passed] == ["group"]
