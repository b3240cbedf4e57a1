"""Reads training steps that were recorded on GPUs, so that a lesson can show them beside a run on this machine.

    step = recordings.load("02_manual_ddp")     # a file in shared/data/traces
    recorded_plots.step(step)                   # a figure, with a title that says where it was recorded
    step.lines[0].exposed_ms                    # each rank has a Timeline, as after timeline.record

`make gpu` records these files with torch.profiler, and ui.perfetto.dev opens them. A computing kernel is in the lane of
the phase that launched it. The kernels of NCCL are in the lanes of communication, whichever stream they used.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from shared.timeline import ALL_GATHER, COMMUNICATION, COMPUTE_LANES, REDUCE_SCATTER, Span, Timeline

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traces"
HOST, LAUNCH = "host", "launch"  # lanes of the phases of the host, and of its launches of collectives
_LANES = {"phase": HOST, "launch": LAUNCH} | {lane: lane for lane in (*COMPUTE_LANES, COMMUNICATION)}
_KINDS = {"all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER}


@dataclass(frozen=True)
class Recording:
    """A training step that was recorded on every rank, on one clock that begins at 0."""

    lines: list[Timeline]
    facts: dict  # the metadata of the file

    @property
    def title(self) -> str:
        """Return a line that says what was recorded, on which device, and with which versions."""
        facts = self.facts
        device = facts.get("device", "an unknown device")
        if facts.get("shared GPU"):
            device += f", shared by {len(self.lines)} ranks"
        versions = [f"{name} {facts[name]}" for name in ("NCCL", "torch") if facts.get(name)]
        return f"{facts.get('title', 'one step')}, recorded on {', '.join([device, *versions])}"


def load(name: str) -> Recording:
    """Load a recorded step that comes with the course, such as "02_manual_ddp".

    Raises:
        FileNotFoundError: If there is no recording of this name.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        names = ", ".join(sorted(other.stem for other in FOLDER.glob("*.json"))) or "none"
        raise FileNotFoundError(f"there is no recorded step {name!r}; the recorded steps are: {names}")
    return from_trace(path)


def from_trace(path: str | Path) -> Recording:
    """Read a step from a file that `make gpu` wrote to build/gpu/traces.

    Raises:
        ValueError: If the file is not such a trace.
    """
    trace = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(trace, dict) or "ranks" not in trace.get("otherData", {}):
        raise ValueError(f"{Path(path).name} is not a step that `make gpu` recorded")
    lines = [Timeline(rank) for rank in range(trace["otherData"]["ranks"])]
    for event in trace["traceEvents"]:
        lane = _LANES.get(event.get("cat"))
        if event["ph"] == "X" and lane is not None:
            lines[event["pid"]].spans.append(_span_of(event, lane))
    for line in lines:
        line.spans.sort(key=lambda span: span.began_s)
        line.began_s = min(span.began_s for span in line.spans)
        line.ended_s = max(span.ended_s for span in line.spans)
    return Recording(lines, trace["otherData"])


def _span_of(event: dict, lane: str) -> Span:
    name = event["name"].removeprefix("launch ").partition(",")[0]  # after the comma, the size in MB
    if lane == COMMUNICATION:
        lane = _KINDS.get(name.partition(" ")[0], COMMUNICATION)
    began_s = event["ts"] / 1e6
    payload_bytes = event.get("args", {}).get("payload_bytes", 0)
    return Span(lane, name, began_s, began_s + event["dur"] / 1e6, payload_bytes)
