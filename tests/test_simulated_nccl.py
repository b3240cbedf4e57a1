"""Simulated NCCL finds what gloo hides, and accepts what is right on NCCL.

The functions without `test_` run on the ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared import ranks, wire
from shared.checks.__main__ import available, run_file
from shared.deadlines import scaled
from shared.wire import simulated_nccl
from solutions.strategies import STRATEGIES
from tests import mutation_results

pytestmark = pytest.mark.slow
VIOLATION = "NCCLViolation"


@pytest.fixture(scope="module")
def simulated():
    ranks.start(4, backend="gloo:cpu", simulate="nccl", detect_mismatch=False)
    yield
    ranks.stop()


# -- wrong code


def use_before_wait() -> torch.Tensor:
    data = torch.ones(4)
    dist.all_reduce(data, async_op=True)
    return data + 1


def write_before_wait() -> None:
    data = torch.ones(4)
    work = dist.all_reduce(data, async_op=True)
    data.zero_()
    work.wait()


def change_an_input_in_flight() -> None:
    data, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    work = dist.all_gather_into_tensor(gathered, data, async_op=True)
    data.add_(1)
    work.wait()


def free_an_output_in_flight() -> None:
    data, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    work = dist.all_gather_into_tensor(gathered, data, async_op=True)
    gathered.untyped_storage().resize_(0)
    work.wait()


def use_in_another_group() -> None:
    data, other = torch.ones(4), dist.new_group()
    dist.all_reduce(data, async_op=True)
    dist.all_reduce(data, group=other)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (use_before_wait, r"the output of all_reduce #\d+ \(float32, 4 elements\), launched at .*was used before wait"),
        (write_before_wait, "was written to before wait"),
        (change_an_input_in_flight, "the input of all_gather_into_tensor .* was changed in flight"),
        (free_an_output_in_flight, "the output of all_gather_into_tensor .* was freed in flight"),
        (use_in_another_group, "was written to before wait"),
    ],
)
def test_code_that_gloo_accepts_and_nccl_would_not_is_reported(simulated, wrong, message):
    with pytest.raises(ranks.CellFailed, match=message) as failed:
        ranks.run(wrong)
    assert "Ranks 0–3 failed" in str(failed.value) and wrong.__name__ in str(failed.value)


def send_before_receiving() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.ones(4), torch.empty(4)
    works = [dist.isend(outgoing, (rank + 1) % world_size), dist.irecv(incoming, (rank - 1) % world_size)]
    for work in works:
        work.wait()


def test_a_ring_that_sends_before_it_receives_hangs(simulated):
    with pytest.raises(ranks.CellFailed, match="Rank 0 waits in send #1 to rank 1") as failed:
        ranks.run(send_before_receiving, timeout_s=scaled(30))
    assert failed.value.restarted  # nothing else ends the wait for a communicator


def reduce_alone() -> None:
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(4))
    print("the host goes on")


def test_a_hang_belongs_to_the_cell_that_caused_it(simulated):
    with pytest.raises(ranks.CellFailed, match=r"Ranks 1–3 wait in all_reduce #\d+ .* for rank 0"):
        ranks.run(reduce_alone, timeout_s=scaled(10))
    assert ranks.run(dist.get_rank) == [0, 1, 2, 3]


# -- right code


def reduce_in_every_way() -> tuple:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    synchronous, asynchronous, chained = torch.ones(4), torch.ones(4), torch.ones(world_size)
    with wire.ledger() as log:
        dist.all_reduce(synchronous)
        work = dist.all_reduce(asynchronous, async_op=True)
        view = asynchronous[1:]  # a view uses no values
        work.wait()
        piece = torch.empty(1)
        dist.reduce_scatter_tensor(piece, chained, async_op=True)
        work = dist.all_gather_into_tensor(chained, piece, async_op=True)  # after it, on the same communicator
        work.wait()
        parcel, received = torch.full((2,), float(rank)), torch.empty(2)
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        pair = [dist.P2POp(dist.isend, parcel, right), dist.P2POp(dist.irecv, received, left)]
        for each in dist.batch_isend_irecv(pair):
            each.wait()
        freed = torch.empty(world_size)
        dist.all_gather_into_tensor(freed, torch.ones(1))
        total = freed.sum().item()
        freed.untyped_storage().resize_(0)
    times = [entry.took_ms for entry in log.entries if entry.op == "all_reduce"]
    return synchronous.tolist(), view.tolist(), chained.tolist(), received.tolist(), total, times


def test_right_code_computes_the_right_values(simulated):
    for rank, (synchronous, view, chained, received, total, times) in enumerate(ranks.run(reduce_in_every_way)):
        assert synchronous == [4] * 4 and view == [4] * 3 and chained == [4] * 4
        assert received == [(rank - 1) % 4] * 2 and total == 4
        assert len(times) == 2 and None not in times


def outputs_in_flight() -> tuple[bool, list[int]]:
    simulation = simulated_nccl
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int16)
    works = [dist.all_reduce(floats, async_op=True), dist.all_reduce(integers, async_op=True)]
    with torch.utils._python_dispatch._disable_current_modes():
        raw = floats.isnan().all().item(), [number for number in integers.tolist()]
    for work in works:
        work.wait()
    del simulation
    return raw


def test_outputs_hold_garbage_until_the_stream_has_waited(simulated):
    assert ranks.run(outputs_in_flight) == [(True, [0x5555, 0x5555])] * 4


def train_with_torch(wrap: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    if wrap == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step in range(3):
        inputs = torch.full((2, 8), float(dist.get_rank() + step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_torchs_own_wrappers_break_no_rule(simulated, wrap):
    assert all(loss == loss for losses in ranks.run(train_with_torch, wrap) for loss in losses)
