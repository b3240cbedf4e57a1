"""Saves timelines to a file for a trace viewer: ui.perfetto.dev or chrome://tracing."""

import json
from pathlib import Path

from shared.timeline import Span, Timeline, rows_of


def save(lines: list[Timeline], path: str | Path) -> Path:
    """Write the ranks' timelines to a file, with one process per rank and one thread per row.

    Source: the Trace Event Format, complete events ("X") in microseconds.
    """
    if not lines or not any(line.spans for line in lines):
        raise ValueError("There is nothing to save. Record a step with timeline.record(...) on the ranks first.")
    start_s = min(line.began_s for line in lines)
    events = []
    for index, line in enumerate(lines):
        rank = index if line.rank is None else line.rank
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        for row, (name, spans) in enumerate(rows_of(line)):
            events.append(_metadata("thread_name", rank, row, name))
            events += [_event(span, rank, row, start_s) for span in spans]
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _event(span: Span, rank: int, row: int, start_s: float) -> dict:
    return {
        "name": span.name,
        "cat": span.lane,
        "ph": "X",
        "ts": 1e6 * (span.began_s - start_s),
        "dur": 1e6 * (span.ended_s - span.began_s),
        "pid": rank,
        "tid": row,
        "args": {"payload_bytes": span.payload_bytes} if span.payload_bytes else {},
    }


def _metadata(kind: str, rank: int, row: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
