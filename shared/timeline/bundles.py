"""Merges the sends and receives of a hand-written collective into one span of a timeline.

Over gloo, a hand-written all-gather is 2(N−1) sends and receives. `plots.timeline` would draw each one in its own row.
"""

from collections.abc import Sequence
from dataclasses import replace

from shared.timeline import COMMUNICATION, Timeline


def bundled(
    line: Timeline,
    messages: int,
    names: Sequence[str] = (),
    lanes: Sequence[str] = (),
    most_s: float = float("inf"),
) -> Timeline:
    """Return a copy of a timeline that starts at time 0 and has one span per `messages` consecutive operations.

    Args:
        names: A name for each of these spans, in launch order. Without names, they are numbered from 1.
        lanes: A lane for each of them, such as "all-gather". Without lanes, all stay in the lane "communication".
        most_s: The time that the link needs for one span. A rank notices the end of a transfer only when it waits for
            it, so a recorded span may be longer.

    Raises:
        ValueError: If there are not as many names, or lanes, as spans.
    """
    sent = [span for span in line.spans if span.lane == COMMUNICATION]  # in launch order
    bundles = [sent[start : start + messages] for start in range(0, len(sent), messages)]
    names = names or [str(number) for number in range(1, len(bundles) + 1)]
    lanes = lanes or [COMMUNICATION] * len(bundles)
    merged = [
        replace(
            spans[0],
            lane=lane,
            name=name,
            ended_s=min(max(span.ended_s for span in spans), spans[0].began_s + most_s),
            payload_bytes=sum(span.payload_bytes for span in spans),
        )
        for lane, name, spans in zip(lanes, names, bundles, strict=True)
    ]
    rest = [span for span in line.spans if span.lane != COMMUNICATION]
    start_s = line.began_s
    spans = [
        replace(span, began_s=span.began_s - start_s, ended_s=span.ended_s - start_s)
        for span in sorted(rest + merged, key=lambda span: span.began_s)
    ]
    waits = [(began - start_s, ended - start_s) for began, ended in line.waits]
    return replace(line, spans=spans, waits=waits, began_s=0.0, ended_s=line.ended_s - start_s)
