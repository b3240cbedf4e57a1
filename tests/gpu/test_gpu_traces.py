"""The traces of `make gpu` without a GPU: a dry run on the CPU, and profiles made by hand as a GPU would give them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.deadlines import scaled
from tests.gpu import reduction, steps, traces
from tests.gpu.reduction import COMMUNICATION, COMPUTE, PREFIX, Event, Reduced
from tests.gpu.results import SKIPPED
from tests.gpu.steps import Machine

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
BASE_NS = 1_790_857_026_000_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
MATMUL = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"
GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
    "at::native::GeluType)::{lambda()#1}, std::array<char*, 2ul> >(int, float, std::array<char*, 2ul>)"
)
COMPUTE_STREAM, NCCL_STREAM = 7, 24


class Cuda:
    """Builds a profile as a GPU would give it, in microseconds."""

    def __init__(self, began: float = 0.0):
        self.began, self.events, self.launches = began, [], 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 99, "tid": tid, "dur": dur, "args": args}
        self.events.append(event | {"ts": self.began + ts})

    def range(self, name: str, ts: float, dur: float) -> None:
        self.add("user_annotation", f"{PREFIX}{name}", ts, dur)
        self.add("gpu_user_annotation", f"{PREFIX}{name}", ts, dur, tid=COMPUTE_STREAM)  # as on the GPU's row

    def kernel(self, name: str, launched: float, ts: float, dur: float, stream: int, **args) -> None:
        self.launches += 1
        self.add("cuda_runtime", "cudaLaunchKernel", launched, 2.0, tid=2, correlation=self.launches)
        self.add("kernel", name, ts, dur, tid=stream, stream=stream, correlation=self.launches, **args)

    def profile(self) -> dict:
        flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 99, "tid": 1, "ts": 1.0}
        named = {"ph": "M", "name": "thread_name", "pid": 99, "tid": 1, "args": {"name": "python"}, "ts": 0.0}
        return {"baseTimeNanoseconds": BASE_NS, "traceEvents": [flow, named, *self.events]}


def a_step(began: float = 0.0, nccl_stream: int = NCCL_STREAM) -> Cuda:
    """Return a step in which an all-reduce of a bucket runs beside backward, and the next one after it."""
    cuda = Cuda(began)
    cuda.kernel(ALL_REDUCE, launched=1.0, ts=2.0, dur=3.0, stream=nccl_stream)  # of the barrier before the step
    cuda.range("all", 10.0, 1000.0)
    cuda.range("forward", 20.0, 100.0)
    cuda.kernel(MATMUL, launched=30.0, ts=50.0, dur=60.0, stream=COMPUTE_STREAM)
    cuda.kernel(GELU, launched=40.0, ts=110.0, dur=30.0, stream=COMPUTE_STREAM)
    cuda.range("backward", 130.0, 200.0)
    cuda.kernel(MATMUL, launched=140.0, ts=200.0, dur=200.0, stream=COMPUTE_STREAM)
    cuda.add("cpu_op", "c10d::allreduce_", 150.0, 20.0, tid=2)
    cuda.kernel(ALL_REDUCE, launched=160.0, ts=250.0, dur=100.0, stream=nccl_stream)
    cuda.range("finish_gradient_sync", 340.0, 100.0)
    cuda.add("user_annotation", "OverlappedDDP::finish_gradient_sync", 341.0, 90.0)
    cuda.add("cpu_op", "c10d::allreduce_", 350.0, 20.0)
    cuda.kernel(ALL_REDUCE, launched=360.0, ts=400.0, dur=300.0, stream=nccl_stream)
    cuda.range("optimizer.step", 450.0, 50.0)
    cuda.add("cpu_op", "aten::_foreach_add", 455.0, 20.0)
    cuda.kernel("void at::native::multi_tensor_apply_kernel<X>(Y)", 460.0, 700.0, 100.0, COMPUTE_STREAM)
    cuda.range("wait for the GPU", 505.0, 400.0)
    cuda.add("cuda_runtime", "cudaDeviceSynchronize", 506.0, 390.0)
    return cuda


CALLS = [("all_reduce", 2_000_000), ("all_reduce", 1_000_000)]


def events_of(trace: dict, thread: str) -> list[dict]:
    """Return the intervals of the thread with this name."""
    (named,) = [e for e in trace["traceEvents"] if e["name"] == "thread_name" and e["args"]["name"] == thread]
    where = named["pid"], named["tid"]
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and (event["pid"], event["tid"]) == where]


def check_trace(trace: dict) -> None:
    """Check that a viewer can show a trace: known fields, no negative time, and intervals that nest in each thread."""
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert {event["ph"] for event in events} == {"X"}
    assert min(event["ts"] for event in events) == 0 and min(event["dur"] for event in events) >= 0
    assert all(set(event) <= {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} for event in events)
    for thread in {(event["pid"], event["tid"]) for event in events}:
        assert thread[1] > 0
        open_until = []
        of_thread = [event for event in events if (event["pid"], event["tid"]) == thread]
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            ended = event["ts"] + event["dur"]
            assert not open_until or ended <= open_until[-1] + 1e-6, event
            open_until.append(ended)


def test_kernels_and_collectives_of_two_ranks_are_on_one_clock():
    reduced = [reduction.reduce(a_step(began).profile(), CALLS) for began in (0.0, 5.0)]
    assert [each.kernels for each in reduced] == [6, 6], "the barrier is not part of the step"
    trace = json.loads(reduction.as_text(reduction.as_trace(reduced, {"device": "a GPU"})))
    check_trace(trace)
    assert trace["otherData"] == {"device": "a GPU"}
    compute = events_of(trace, "rank 0 · compute stream")
    assert [(event["name"], event["cat"], event["ts"], event["dur"]) for event in compute] == [
        ("matmul", "forward", 30.0, 60.0),
        ("GELU", "forward", 90.0, 30.0),
        ("matmul", "backward", 180.0, 200.0),
        ("optimizer update", "optimizer", 680.0, 100.0),
    ]
    sent = events_of(trace, "rank 1 · NCCL stream")
    assert [(event["name"], event["cat"], event["ts"], event["dur"]) for event in sent] == [
        ("all_reduce 1, 2 MB", "communication", 235.0, 100.0),
        ("all_reduce 2, 1 MB", "communication", 385.0, 300.0),
    ]
    assert sent[0]["args"] == {"payload_bytes": 2_000_000}
    assert [event["name"] for event in events_of(trace, "rank 0 · host")] == [
        *("forward", "backward", "launch all_reduce 1, 2 MB", "finish_gradient_sync"),
        *("OverlappedDDP::finish_gradient_sync", "launch all_reduce 2, 1 MB", "optimizer.step"),
        *("wait for the GPU", "host waits for the GPU"),
    ]


def test_a_synchronous_collective_stays_on_the_stream_that_it_used():
    (rank,) = [reduction.reduce(a_step(nccl_stream=COMPUTE_STREAM).profile(), CALLS)]
    assert rank.streams == {COMPUTE_STREAM: "compute stream"}
    lanes = [event.lane for event in rank.events if event.row != reduction.HOST and event.lane == "communication"]
    assert len(lanes) == 2


@pytest.mark.parametrize(
    "kernel, args, name, size",
    [
        (ALL_REDUCE, {}, "all_reduce", 0),
        (REDUCE_SCATTER, {}, "reduce_scatter", 0),
        (ALL_GATHER, {}, "all_gather", 0),
        (SEND_RECV, {}, "send/recv", 0),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)", {}, "broadcast", 0),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", {}, "all_gather", 0),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", {}, "NCCL", 0),
        (
            "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
            {"Collective name": "_reduce_scatter_base", "dtype": "BFloat16", "In msg nelems": 8, "Out msg nelems": 4},
            *("reduce_scatter", 16),
        ),
        (ALL_REDUCE, {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 5}, "all_reduce", 20),
        (ALL_REDUCE, {"Collective name": "new", "dtype": "Float3", "In msg nelems": "5"}, "all_reduce", 0),
    ],
)
def test_the_kernels_of_nccl_are_named_by_collective(kernel, args, name, size):
    assert reduction.is_nccl(kernel)
    assert reduction.collective_of(kernel, args) == name
    assert reduction.bytes_of(args) == size


def test_sizes_come_from_the_calls_only_if_they_are_the_same_collectives():
    for calls, expected in (([("all_reduce", 8)], 0), ([("broadcast", 8), ("all_reduce", 8)], 0), (CALLS, 2_000_000)):
        reduced = reduction.reduce(a_step().profile(), calls)
        first = next(event for event in reduced.events if event.row == COMMUNICATION)
        assert (first.name, first.payload_bytes) == ("all_reduce 1", expected)


@pytest.mark.parametrize(
    "kernel, name",
    [
        (MATMUL, "matmul"),
        (GELU, "GELU"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(X)", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64> >(X)", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(X)", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>(X)", "layer norm"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<X>(Y)", "concatenate"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(X)", "fill"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::something_new<X>(Y)", "something_new"),
        ("", "kernel"),
    ],
)
def test_other_kernels_get_a_short_name(kernel, name):
    assert not reduction.is_nccl(kernel)
    assert reduction.short_name(kernel) == name


def test_events_that_a_viewer_could_not_nest_are_cut():
    outer, inner = Event("host", "phase", "a", 0, 100), Event("host", "launch", "b", 50, 150)
    after = Event("host", "launch", "c", 100, 120)
    assert [(event.name, event.ended_ns) for event in reduction.nested([inner, after, outer])] == [
        ("a", 100),
        ("b", 100),
        ("c", 120),
    ]


def test_kernels_that_overlap_get_a_second_line():
    events = [
        Event(COMPUTE, "forward", str(i), began, began + 10_000, stream=7) for i, began in enumerate((0, 9_500, 15_000))
    ]
    trace = reduction.as_trace([Reduced(events, 3, {7: "compute stream"})], {})
    check_trace(trace)
    assert [event["dur"] for event in events_of(trace, "rank 0 · compute stream")] == [9.5, 10.0]
    assert [event["name"] for event in events_of(trace, "rank 0 · compute stream, line 2")] == ["2"]


def test_a_long_trace_loses_its_shortest_kernels_and_says_so():
    events = [Event(COMPUTE, "forward", "matmul", 100_000 * i, 100_000 * i + 1000 + i, stream=7) for i in range(5000)]
    sent = [Event(COMMUNICATION, COMMUNICATION, "all_reduce 1", 0, 10, 8, stream=9)]
    streams = {7: "compute stream", 9: "NCCL stream"}
    text = reduction.as_text(reduction.as_trace([Reduced(events + sent, 5000, streams)], {"device": "a GPU"}))
    assert 200_000 < len(text.encode()) < reduction.MOST_BYTES
    trace = json.loads(text)
    kept = events_of(trace, "rank 0 · compute stream")
    assert trace["otherData"]["left out"] == f"the {5000 - len(kept)} shortest kernels"
    assert kept[-1]["ts"] == 499_900.0 and len(events_of(trace, "rank 0 · NCCL stream")) == 1


# -- the program


@pytest.mark.timeout(scaled(300))
def test_a_dry_run_writes_four_traces(tmp_path):
    command = [sys.executable, "-m", "tests.gpu.traces", "--dry", "--result", str(tmp_path / "report.json")]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    passed = [check["name"] for check in report["checks"] if check["outcome"] == "passed"]
    assert passed == ["ranks start", *(each.title for each in traces.RECORDINGS), "a stop leaves no process"]
    assert len(report["notes"]) == 4
    written = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in written] == [f"{each.chapter}.json" for each in traces.RECORDINGS]
    for path in written:
        assert 10_000 < path.stat().st_size < 300_000
        trace = json.loads(path.read_text())
        check_trace(trace)
        facts = trace["otherData"]
        assert facts["ranks"] == 2 and facts["device"].startswith("CPU with ") and facts["torch"]
        for rank in range(2):
            phases = [event["name"] for event in events_of(trace, f"rank {rank} · host") if event["cat"] == "phase"]
            assert [name for name in phases if name != "finish_gradient_sync"] == [
                *("zero_grad", "forward", "backward", "optimizer.step"),
            ]
            lanes = {event["cat"] for event in events_of(trace, f"rank {rank} · operators")}
            assert lanes >= {"forward", "backward", "optimizer"}
            assert all(event["args"]["payload_bytes"] for event in events_of(trace, f"rank {rank} · gloo"))


def test_without_nccl_it_is_skipped_and_says_why(tmp_path):
    path = tmp_path / "report.json"
    assert traces.main(["--result", str(path), "--folder", str(tmp_path), "--backend", "gloo:cpu"]) == 0
    assert [(check["outcome"], check["reason"]) for check in json.loads(path.read_text())["checks"]] == [
        (SKIPPED, "2 ranks would use gloo on cpu, cpu, and not NCCL")
    ]
    assert not (tmp_path / "traces").exists()


def test_the_step_writes_into_the_folder_of_the_run_and_needs_nccl_for_two_ranks():
    for machine in (Machine(1, nccl_ranks=4), Machine(8, nccl_ranks=8), Machine(0, dry=True)):
        (part,) = [part for part in steps.parts(machine) if part.step == "traces"]
        assert part.skip == "" and part.command[-1 - 3 * machine.dry] == steps.KEPT
    (part,) = [part for part in steps.parts(Machine(1, nccl_ranks=1)) if part.step == "traces"]
    assert part.skip == "this NCCL cannot run 2 ranks on 1 GPU"
    order = list(steps.TITLES)
    assert order.index("traces") == order.index("nccl-semantics") + 1
