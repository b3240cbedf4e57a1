"""A rank is stopped while it waits in NCCL: its group ends, its output is dropped, and the next cell works.

No GPU is needed. `StandIn` takes the place of ProcessGroupNCCL, and behaves as its source says. The functions without
`test_` run on the ranks.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from IPython import get_ipython

from shared import ranks
from shared.checks.engine import parcel
from shared.deadlines import scaled
from shared.ranks import doctor, magic, pickles, rankside
from shared.ranks.errors import RanksError
from shared.ranks.processes import RankProcesses

pytestmark = pytest.mark.slow  # the ranks hang until a deadline

SOON_S = scaled(25.0)


class StandIn:
    """The NCCL backend of a process group, with one collective in flight that will never complete."""

    def __init__(self, ends_after: threading.Event | None = None):
        self.aborts, self.ended = threading.Event(), threading.Event()
        self.ends_after = ends_after

    def abort(self) -> None:
        """End the communicator. It may take as long as another communicator's collective is in flight."""
        self.aborts.set()
        if self.ends_after is not None:
            self.ends_after.wait()
        self.ended.set()

    def wait(self) -> None:
        """Wait for the collective, as `.item()` does. After an abort, this returns as if nothing had happened."""
        while not self.ended.is_set():  # in small steps, so that an interrupt comes through
            self.ended.wait(0.01)


# -- on real ranks


def install(kind: str) -> None:
    """Let this rank's doctor find stand-ins, and let cells wait for them as `nccl`."""
    first = StandIn()
    backends = [first]
    if kind == "each waits for the other":
        second = StandIn(ends_after=first.aborts)
        first.ends_after = second.aborts
        backends.append(second)
    if kind == "never ends":
        first.ends_after = threading.Event()
    doctor._nccl_backends = lambda: backends
    rankside._LEAVES_WITHIN_S = scaled(1.0)
    get_ipython().user_ns.update(nccl=first, marker="kept")


ONE_RANK_WAITS = """
from IPython.display import HTML, display

print(f"rank {rank} begins")
display(HTML(f"<b>figure of rank {rank}</b>"))
if rank == 0:
    raise ValueError("no such batch")
nccl.wait()
print("computed from garbage")
display(HTML("<b>drawn from garbage</b>"))
"""


def failure_of(source: str) -> tuple[ranks.CellFailed, float]:
    began = time.monotonic()
    with pytest.raises(ranks.CellFailed) as caught:
        magic.cell("", source.strip())
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("kind", ["ends", "each waits for the other"])
def test_output_from_after_an_abort_is_dropped_and_the_cell_fails(two_ranks, capsys, kind):
    ranks.run(install, kind)
    failure, seconds = failure_of(ONE_RANK_WAITS)
    printed = capsys.readouterr().out
    assert str(failure).startswith("Rank 0 failed: ValueError: no such batch")
    assert "rank 0 begins" in printed and "rank 1 begins" in printed
    assert "garbage" not in printed
    innocent = failure.outcomes[1]
    assert innocent.error["message"].startswith("RuntimeError: The cell was stopped on this rank")
    assert innocent.error["others_fault"]
    assert [bundle["text/html"] for bundle in innocent.displays] == ["<b>figure of rank 1</b>"]
    assert seconds < SOON_S
    assert not failure.restarted and ranks.pull("marker") == ["kept"] * 2
    assert_next_cell_works()


def test_a_call_that_was_stopped_returns_nothing(two_ranks):
    ranks.run(install, "ends")
    with pytest.raises(ranks.CellFailed) as caught:
        ranks.run(fail_or_return)
    assert caught.value.outcomes[1].value is None and caught.value.outcomes[1].error


def fail_or_return() -> str:
    nccl = get_ipython().user_ns["nccl"]
    if rankside.here.rank == 0:
        raise ValueError("no such batch")
    nccl.wait()
    return "garbage"


def test_ranks_whose_communicators_never_end_are_replaced(two_ranks):
    ranks.run(install, "never ends")
    failure, seconds = failure_of(ONE_RANK_WAITS)
    assert failure.restarted and "ariables are gone" in str(failure)
    assert seconds < SOON_S
    assert_next_cell_works()


def assert_next_cell_works() -> None:
    magic.cell("", "total = torch.ones(1) * (rank + 1)\ndist.all_reduce(total)")
    assert [value.item() for value in ranks.pull("total")] == [3, 3]


def tensors_of_a_gpu() -> tuple[dict, bytes]:
    """Return tensors that are pickled as a GPU's would be, unless they are copied to the CPU first, and a parcel."""
    tensors = {"plain": torch.arange(3), "trained": torch.ones(2, requires_grad=True)}
    on_gpu = {tensor.data_ptr() for tensor in tensors.values()}
    device = f"cuda:{rankside.here.rank}"

    def tag(storage) -> str | None:
        return device if storage.data_ptr() in on_gpu else None

    torch.serialization.register_package(0, tag, lambda *_: None)
    pickles.is_on_gpu = lambda tensor: tensor.data_ptr() in on_gpu
    return tensors, parcel.pack(tensors)


def test_tensors_of_a_gpu_arrive_on_the_cpu(two_ranks):
    """In the notebook, they would create a CUDA context on each GPU, or raise an error if it has none."""
    for returned, packed in ranks.run(tensors_of_a_gpu):
        for tensors in (returned, parcel.unpack(packed)):
            assert tensors["plain"].device.type == "cpu" and tensors["plain"].tolist() == [0, 1, 2]
            assert tensors["trained"].device.type == "cpu" and tensors["trained"].requires_grad
    ranks.stop()  # the next ranks pickle their tensors as usual


def test_mismatch_detection_ignores_a_students_default_device(two_ranks):
    magic.cell("", "torch.set_default_device('meta')\ntotal = torch.ones(1, device='cpu')\ndist.all_reduce(total)")
    magic.cell("", "torch.set_default_device(None)")
    assert [value.item() for value in ranks.pull("total")] == [2, 2]


# -- on real GPUs

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
ONE_RANK_REDUCES = """
if rank == 1:
    values = torch.ones(4, device=device)
    dist.all_reduce(values)
    total = values.sum().item()
    print(f"computed from garbage: {total}")
"""


@pytest.fixture
def two_gpus():
    ranks.start(2, backend="nccl", detect_mismatch=False)
    yield
    ranks.stop()


@pytest.mark.gpu
@needs_two_gpus
def test_a_hang_in_nccl_ends_without_losing_variables(two_gpus, capsys):
    magic.cell("", "marker = 'kept'")
    failure, _ = failure_of(ONE_RANK_REDUCES)
    assert "all_reduce" in str(failure) and "garbage" not in capsys.readouterr().out
    assert failure.outcomes[1].error and not failure.restarted
    assert ranks.pull("marker") == ["kept"] * 2
    magic.cell("", "total = torch.ones(1, device=device) * (rank + 1)\ndist.all_reduce(total)")
    assert [value.item() for value in ranks.pull("total")] == [3, 3]


@pytest.mark.gpu
@needs_two_gpus
def test_a_pull_from_gpus_leaves_them_to_the_ranks(two_gpus):
    before = torch.cuda.is_initialized()
    magic.cell("", "weight = torch.nn.Parameter(torch.ones(2, device=device))")
    assert {value.device.type for value in ranks.pull("weight")} == {"cpu"}
    assert torch.cuda.is_initialized() == before


# -- ending communicators


def test_an_abort_that_stalls_is_not_waited_for():
    stalls, ends = StandIn(ends_after=threading.Event()), StandIn()
    began = time.monotonic()
    assert not doctor._abort([stalls, ends], 0.2)
    assert ends.ended.is_set() and time.monotonic() - began < SOON_S


def test_an_abort_that_fails_prints_nothing(capsys):
    class Fails:
        def abort(self):
            raise RuntimeError("ProcessGroup abort timed out")

    assert doctor._abort([Fails()], SOON_S)
    assert capsys.readouterr() == ("", "")


class Answer:
    """What a rank answers to the kernel: an error, or nothing for a long time."""

    def __init__(self, error: Exception | None = None):
        self.error = error

    def ready(self) -> bool:
        return self.error is not None

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def get(self, timeout: float) -> None:
        raise self.error or TimeoutError("Result not ready.")


class Line:
    def __init__(self, answer: Answer):
        self.answer = answer

    def apply_async(self, *request) -> Answer:
        return self.answer


def test_the_kernel_does_not_wait_for_ranks_that_wait_for_one_that_failed(monkeypatch):
    """With NCCL, ranks may take 90 s to join. Rank 1 cannot leave its old group, so rank 0 would wait in vain."""
    processes = object.__new__(RankProcesses)
    processes._server = SimpleNamespace(runs=True)
    processes._lines = [Line(Answer()), Line(Answer(RuntimeError("NCCL has not ended its communicators")))]
    monkeypatch.setattr(processes, "_deaths", dict, raising=False)
    began = time.monotonic()
    with pytest.raises(RanksError, match="Rank 1 did not become ready: NCCL has not ended"):
        processes._on_all(lambda rank: (print,), timeout_s=2 * SOON_S)
    assert time.monotonic() - began < SOON_S


def raise_in_a_batch() -> None:
    """Raise where batch_isend_irecv() does: torch has begun a batch, and does not end it after an error."""
    dist.distributed_c10d._world.pg_coalesce_state[dist.group.WORLD] = []
    raise ValueError("Tensors must be contiguous")


def test_ranks_are_replaced_after_an_error_inside_a_batch(two_ranks):
    """NCCL would queue all that these ranks launch later, and never run it."""
    with pytest.raises(ranks.CellFailed, match="inside a batch of sends and receives") as failed:
        ranks.run(raise_in_a_batch)
    assert failed.value.restarted
    assert ranks.run(dist.get_rank) == [0, 1]
