"""Reduces the profile of one training step to what a reader looks at: kernels, collectives, and phases of the host.

A profile of torch.profiler has thousands of events, most of them operators inside operators. This file keeps the
kernels of each stream under short names, the collectives with their sizes, and the ranges, launches and waits of the
host. Without a GPU, the outermost operators stand for the kernels, and gloo's threads for NCCL's stream.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field

PREFIX = "step: "  # of our own ranges in a profile
STEP = f"{PREFIX}all"
PHASES = {"zero_grad": "optimizer", "forward": "forward", "backward": "backward", "finish_gradient_sync": "backward"}
PHASES |= {"optimizer.step": "optimizer", "wait for the GPU": "optimizer"}  # the lane of the kernels launched in it
LANES = {*PHASES.values(), "other"}  # of kernels that compute
HOST, COMPUTE, COMMUNICATION = "host", "compute", "communication"  # the rows of a rank
MOST_BYTES = 300_000
ITEM_BYTES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize")
SHORTEST_WAIT_NS = 20_000
OVERLAP_NS = 1_000  # two kernels of a stream that overlap by less follow each other; clocks are not exact

# Each collective is named by operators of c10d, by kernels, by profiles and by our hooks, each in its own way.
COLLECTIVES = {
    "all_reduce": "all_reduce allreduce allreduce_ allreduce_coalesced allreduce_coalesced_ AllReduce",
    "all_gather": "all_gather allgather allgather_ _allgather_base _allgather_base_ AllGather all_gather_into_tensor "
    "allgather_into_tensor_coalesced allgather_into_tensor_coalesced_ all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter reduce_scatter_ _reduce_scatter_base _reduce_scatter_base_ ReduceScatter "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_tensor_coalesced_",
    "broadcast": "broadcast broadcast_ _broadcast_oop Broadcast",
    "reduce": "reduce reduce_ _reduce_oop Reduce",
    "all_to_all": "all_to_all all_to_all_single alltoall_ alltoall_base_",
    "send": "send",
    "recv": "recv recv_",
    "send/recv": "SendRecv",
    "barrier": "barrier",
}
COLLECTIVE_OF = {alias: name for name, aliases in COLLECTIVES.items() for alias in aliases.split()}
# The short name of a kernel is the first one whose pattern is found in its long name.
KERNELS = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("matmul", r"gemm|cutlass|nvjet|xmma|cublas|splitK"),
    ("layer norm", r"layer_?norm|GammaBeta"),
    ("GELU", r"gelu"),
    ("softmax", r"soft_?max"),
    ("cross-entropy", r"nll_loss|cross_?entropy"),
    ("optimizer update", r"multi_tensor|adam|lamb"),
    ("embedding", r"embedding|indexing_backward|index(?:Select|_put|_elementwise)|gather|sort|radix"),
    ("concatenate", r"CatArray"),
    ("fill", r"FillFunctor|memset"),
    ("copy", r"copy|memcpy"),
    ("sum", r"reduce_kernel|sum"),
    ("elementwise", r"elementwise"),
)


@dataclass
class Event:
    """An interval in one row of one rank, in nanoseconds since the epoch."""

    row: str
    lane: str
    name: str
    began_ns: int
    ended_ns: int
    payload_bytes: int = 0
    stream: int = 0  # the number of the GPU's stream; 0 on the host


@dataclass
class Reduced:
    """The events of one rank, and what was found out about its streams."""

    events: list[Event]
    kernels: int = 0  # on the GPU; 0 means that the profiler saw no GPU
    streams: dict[int, str] = field(default_factory=dict)  # the name of each stream


class _Profile:
    """The events of a profile, with times in nanoseconds since the epoch."""

    def __init__(self, profile: dict):
        self._base_ns = int(profile.get("baseTimeNanoseconds", 0))
        self.events = [event for event in profile["traceEvents"] if event.get("ph") == "X" and "dur" in event]
        (self.step,) = (event for event in self.events if event["name"] == STEP and not self.is_on_gpu(event))
        self.began_ns, self.ended_ns = self.times(self.step)

    def times(self, event: dict) -> tuple[int, int]:
        began_ns = self._base_ns + round(1000 * float(event["ts"]))
        return began_ns, began_ns + round(1000 * float(event["dur"]))

    def within(self, event: dict) -> bool:
        return self.began_ns <= self.times(event)[0] <= self.ended_ns

    @staticmethod
    def is_on_gpu(event: dict) -> bool:
        return event.get("cat", "").startswith("gpu_") or event.get("cat") == "kernel"


def reduce(profile: dict, calls: list[tuple[str, int]]) -> Reduced:
    """Reduce the profile of one step on one rank.

    Args:
        profile: What `export_chrome_trace` has written. The step is the range named STEP, and its phases are ranges
            whose names begin with PREFIX.
        calls: The name and the payload in bytes of each collective that the rank launched in this step, in order.
    """
    found = _Profile(profile)
    kernels = [event for event in found.events if _is_kernel(event)]
    phases = _phases(found)
    host = _host(found, calls)
    if kernels:
        reduced = _on_gpu(found, kernels, phases, calls)
    else:
        reduced = _on_cpu(found, phases, calls)
    reduced.events = host + reduced.events
    return reduced


def _is_kernel(event: dict) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _phases(found: _Profile) -> list[tuple[int, int, str]]:
    ranges = [event for event in found.events if event["name"].removeprefix(PREFIX) in PHASES]
    ranges = [event for event in ranges if event["name"].startswith(PREFIX) and not found.is_on_gpu(event)]
    return sorted((*found.times(event), PHASES[event["name"].removeprefix(PREFIX)]) for event in ranges)


def _lane_at(phases: list[tuple[int, int, str]], at_ns: int) -> str:
    return next((lane for began_ns, ended_ns, lane in phases if began_ns <= at_ns <= ended_ns), "other")


# -- the GPU


def _on_gpu(found: _Profile, kernels: list[dict], phases: list, calls: list[tuple[str, int]]) -> Reduced:
    launched_ns = {
        event["args"]["correlation"]: found.times(event)[0]
        for event in found.events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    events, of_nccl = [], []
    for kernel in sorted(kernels, key=lambda kernel: float(kernel["ts"])):
        arguments = kernel.get("args", {})
        began_ns, ended_ns = found.times(kernel)
        launch_ns = launched_ns.get(arguments.get("correlation"), began_ns)
        if not found.began_ns <= launch_ns <= found.ended_ns:
            continue  # of the barrier before the step
        stream = int(arguments.get("stream", kernel.get("tid", 0)))
        name = kernel["name"]
        if is_nccl(name):
            event = Event(COMMUNICATION, COMMUNICATION, collective_of(name, arguments), began_ns, ended_ns)
            event.payload_bytes = bytes_of(arguments)
            of_nccl.append(event)
        else:
            event = Event(COMPUTE, _lane_at(phases, launch_ns), short_name(name), began_ns, ended_ns)
        event.stream = stream
        events.append(event)
    _number(of_nccl, calls)
    return Reduced(events, len(events), _name_streams(events))


def is_nccl(kernel: str) -> bool:
    return "nccl" in kernel.lower().split("(")[0]


def collective_of(kernel: str, arguments: dict) -> str:
    """Return the name of the collective that a kernel of NCCL runs."""
    said = arguments.get("Collective name", "")
    if said in COLLECTIVE_OF:
        return COLLECTIVE_OF[said]
    match = re.search(r"Kernel_([A-Za-z]+)", kernel)
    return COLLECTIVE_OF.get(match[1], "NCCL") if match else "NCCL"


def bytes_of(arguments: dict) -> int:
    """Return the size of the larger buffer of a collective, or 0 if the profile does not say it."""
    item_bytes = ITEM_BYTES.get(arguments.get("dtype", ""), 0)
    sizes = [int(arguments.get(f"{end} msg nelems") or 0) for end in ("In", "Out")]
    return item_bytes * max(sizes)


def short_name(kernel: str) -> str:
    """Return what a kernel computes, or the beginning of its name."""
    for name, pattern in KERNELS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    plain = kernel.removeprefix("void ").split("(")[0].split("<")[0]
    return (plain.rpartition("::")[2] or plain)[:40] or "kernel"


def _number(events: list[Event], calls: list[tuple[str, int]]) -> None:
    """Number the collectives in order, and give them the sizes of the calls if these are the same collectives."""
    same = [COLLECTIVE_OF.get(op, op) for op, _ in calls] == [event.name for event in events]
    unknown = len(calls) == len(events) and all(event.name == "NCCL" for event in events)
    for index, event in enumerate(events):
        if same or unknown:
            event.name = COLLECTIVE_OF.get(calls[index][0], event.name)
            event.payload_bytes = calls[index][1]
        event.name = f"{event.name} {index + 1}"


def _name_streams(events: list[Event]) -> dict[int, str]:
    """Name the stream that computes most, and the others that run NCCL."""
    computing: Counter = Counter()
    for event in events:
        computing[event.stream] += (event.ended_ns - event.began_ns) if event.row == COMPUTE else 0
    names = {}
    if computing and max(computing.values()) > 0:
        names[computing.most_common(1)[0][0]] = "compute stream"
    for stream in sorted({event.stream for event in events if event.row == COMMUNICATION} - set(names)):
        names[stream] = "NCCL stream" if "NCCL stream" not in names.values() else f"NCCL stream {stream}"
    return names | {stream: f"stream {stream}" for stream in sorted({event.stream for event in events} - set(names))}


# -- the CPU, if there is no GPU


def _on_cpu(found: _Profile, phases: list, calls: list[tuple[str, int]]) -> Reduced:
    operators = [event for event in found.events if event.get("cat") == "cpu_op" and found.within(event)]
    operators.sort(key=lambda event: (event["tid"], float(event["ts"]), -float(event["dur"])))
    events, inside = [], (None, 0)  # the thread, and the end of the outermost operator in it
    for operator in operators:
        began_ns, ended_ns = found.times(operator)
        if operator["tid"] == inside[0] and ended_ns <= inside[1]:
            continue
        if operator["name"].startswith(("c10d::", "aten::")):
            inside = (operator["tid"], ended_ns)
        if operator["name"].startswith("aten::") and ended_ns > began_ns:
            name = operator["name"].removeprefix("aten::")
            events.append(Event(COMPUTE, _lane_at(phases, began_ns), name, began_ns, ended_ns))
    of_gloo = sorted(
        (event for event in found.events if event["name"].startswith("gloo:") and found.within(event)),
        key=lambda event: float(event["ts"]),
    )
    sent = []
    for event in of_gloo:
        name = event["name"].removeprefix("gloo:")
        sent.append(Event(COMMUNICATION, COMMUNICATION, COLLECTIVE_OF.get(name, name), *found.times(event)))
    _number(sent, calls)
    return Reduced(events + sent)


# -- the host


def _host(found: _Profile, calls: list[tuple[str, int]]) -> list[Event]:
    """Return the ranges of the host, its launches of collectives, and its waits for the GPU."""
    events, launches = [], []
    for event in sorted(found.events, key=lambda event: float(event["ts"])):
        if found.is_on_gpu(event) or not found.within(event):
            continue
        name, (began_ns, ended_ns) = event["name"], found.times(event)
        if name.startswith(PREFIX) and event is not found.step:
            events.append(Event(HOST, "phase", name.removeprefix(PREFIX), began_ns, ended_ns))
        elif event.get("cat") == "user_annotation" and re.match(r"\w+::\w+$", name):
            events.append(Event(HOST, "range", name, began_ns, ended_ns))
        elif name.startswith("c10d::") and name.removeprefix("c10d::") in COLLECTIVE_OF:
            launch = Event(HOST, "launch", COLLECTIVE_OF[name.removeprefix("c10d::")], began_ns, ended_ns)
            launches.append(launch)
        elif name in WAITS and ended_ns - began_ns > SHORTEST_WAIT_NS:
            events.append(Event(HOST, "wait", "host waits for the GPU", began_ns, ended_ns))
    _number(launches, calls)
    for launch in launches:
        launch.name = f"launch {launch.name}"
    return nested(events + launches)


def nested(events: list[Event]) -> list[Event]:
    """Cut events so that each lies inside the one that contains its beginning, as rows of a trace viewer need it."""
    kept, around = [], []
    for event in sorted(events, key=lambda event: (event.began_ns, -event.ended_ns)):
        while around and around[-1].ended_ns <= event.began_ns:
            around.pop()
        if around:
            event.ended_ns = min(event.ended_ns, around[-1].ended_ns)
        if event.ended_ns > event.began_ns:
            kept.append(event)
            around.append(event)
    return kept


# -- the file


def as_trace(ranks: list[Reduced], facts: dict) -> dict:
    """Put the ranks of one step into one trace: a process per rank, and a thread per row, named for a reader."""
    origin_ns = min(event.began_ns for reduced in ranks for event in reduced.events)
    written = []
    for rank, reduced in enumerate(ranks):
        written += [_named("process_name", rank, 0, {"name": f"rank {rank}"})]
        written += [_named("process_sort_index", rank, 0, {"sort_index": rank})]
        for row, (name, events) in enumerate(_rows(reduced).items()):
            thread = 10 * (rank + 1) + row  # thread 0 would be the idle thread, and equal numbers could be merged
            written += [_named("thread_name", rank, thread, {"name": f"rank {rank} · {name}"})]
            written += [_named("thread_sort_index", rank, thread, {"sort_index": row})]
            written += [_written(event, rank, thread, origin_ns) for event in events]
    return {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": written}


def _rows(reduced: Reduced) -> dict[str, list[Event]]:
    """Arrange the events of a rank in rows without overlaps."""
    rows = {HOST: [event for event in reduced.events if event.row == HOST]}
    others = [event for event in reduced.events if event.row != HOST]
    if reduced.streams:
        by_name = {name: [e for e in others if e.stream == stream] for stream, name in reduced.streams.items()}
    else:
        names = {"operators": COMPUTE, "gloo": COMMUNICATION}
        by_name = {name: [event for event in others if event.row == row] for name, row in names.items()}
    for name, events in by_name.items():
        lines: list[list[Event]] = []
        for event in sorted(events, key=lambda event: (event.began_ns, -event.ended_ns)):
            line = next((line for line in lines if line[-1].ended_ns <= event.began_ns + OVERLAP_NS), None)
            if line is None:
                lines.append(line := [])
            elif line[-1].ended_ns > event.began_ns:
                line[-1].ended_ns = max(event.began_ns, line[-1].began_ns)
            line.append(event)
        rows |= {f"{name}, line {index + 1}" if index else name: line for index, line in enumerate(lines)}
    return rows


def _named(kind: str, rank: int, thread: int, arguments: dict) -> dict:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}


def _written(event: Event, rank: int, thread: int, origin_ns: int) -> dict:
    size = f", {event.payload_bytes / 1e6:.3g} MB" if event.payload_bytes else ""
    written = {"ph": "X", "name": event.name + size, "cat": event.lane, "pid": rank, "tid": thread}
    # Both ends are rounded to tenths of a microsecond, so that one event still ends where the next one begins.
    began, ended = (round((at_ns - origin_ns) / 100) for at_ns in (event.began_ns, event.ended_ns))
    written |= {"ts": began / 10, "dur": (ended - began) / 10}
    return written | ({"args": {"payload_bytes": event.payload_bytes}} if event.payload_bytes else {})


def as_text(trace: dict, most_bytes: int = MOST_BYTES) -> str:
    """Return a trace as text. If it is too long, the shortest kernels are left out, and the metadata says how many."""
    text, left_out = _text(trace), 0
    while len(text.encode()) >= most_bytes:
        kernels = [event for event in trace["traceEvents"] if event.get("cat") in LANES]
        drop = sorted(kernels, key=lambda event: event["dur"])[: max(50, len(kernels) // 20)]
        if not drop:
            raise ValueError(f"the trace has {len(text.encode())} bytes, and none of its kernels can be left out")
        dropped, left_out = set(map(id, drop)), left_out + len(drop)
        kept = [event for event in trace["traceEvents"] if id(event) not in dropped]
        facts = trace["otherData"] | {"left out": f"the {left_out} shortest kernels"}
        trace = trace | {"traceEvents": kept, "otherData": facts}
        text = _text(trace)
    return text


def _text(trace: dict) -> str:
    events = ",\n".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in trace["traceEvents"])
    head = {name: value for name, value in trace.items() if name != "traceEvents"}
    return json.dumps(head, ensure_ascii=False)[:-1] + ', "traceEvents": [\n' + events + "\n]}\n"
