"""Run a pipeline schedule on ranks that sleep in place of computing, to see its bubble on any machine."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from shared import ranks
from shared.schedules import Action, Schedule, Simulated, Span, chunks_of, micro_batches_of

MESSAGE = torch.Size([1])
TAGS_PER_KIND = 1 << 20
STEPS = {"F": 1, "B": -1, "W": 0}  # from the chunk that runs an action to the one that waits for it


def sleeping_pipeline(
    schedule: Schedule,
    forward_s: float = 0.64,
    backward_s: float = 1.28,
    slowdowns: Mapping[int, float] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[tuple[Action, float, float]]:
    """Run this rank's actions of a schedule: receive, sleep, send.

    Ranks that share cores cannot compute at the same time, as GPUs do. But they can sleep at the same time. The
    messages are real, but small. They are on the CPU, even if the ranks have GPUs.

    A message takes a fraction of a millisecond, and some of them delay the last action. With longer sleeps, this delay
    is a smaller part of the bubble.

    Args:
        schedule: The actions of each stage; see `shared.schedules`.
        forward_s: How long all forwards of a stage take together.
        backward_s: How long all its backwards take. In a schedule with "W", "B" and "W" take half of it each.
        slowdowns: How many times as long some stages take, by their index.

    Returns:
        This rank's actions, each with the times when it began and ended, in seconds.

    Communication: a barrier, and a message of one element to a neighbor per forward and backward.
    """
    stage, stages = dist.get_rank(group), dist.get_world_size(group)
    micro_batches, chunks = micro_batches_of(schedule), chunks_of(schedule)
    last, actions = stages * chunks - 1, schedule[stage]
    part_s = (slowdowns or {}).get(stage, 1.0) / (micro_batches * chunks)
    halves = 2 if any(action.kind == "W" for action in actions) else 1
    length_s = {"F": forward_s * part_s, "B": backward_s * part_s / halves, "W": backward_s * part_s / halves}
    spans, sent = [], []
    arriving = {}  # received from the start: gloo would otherwise send only once the receiver has asked for it
    for action in actions:
        position = action.chunk * stages + stage
        step = STEPS[action.kind]
        if step and 0 <= position - step <= last:
            buffer, tag = torch.empty(MESSAGE), _tag(action, position)
            work = dist.irecv(buffer, group=group, group_src=(position - step) % stages, tag=tag)
            arriving[action] = work, buffer
    dist.barrier(group)
    start_s = time.perf_counter()
    for action in actions:
        position = action.chunk * stages + stage
        step = STEPS[action.kind]
        if action in arriving:
            work, _ = arriving.pop(action)
            work.wait()
        began_s = time.perf_counter()
        time.sleep(length_s[action.kind])
        spans.append((action, began_s - start_s, time.perf_counter() - start_s))
        if step and 0 <= position + step <= last:
            message, tag = torch.zeros(MESSAGE), _tag(action, position + step)
            work = dist.isend(message, group=group, group_dst=(position + step) % stages, tag=tag)
            sent.append((work, message))
    for work, _ in sent:
        work.wait()
    return spans


def fastest_run(schedule: Schedule, rounds: int = 3, **options) -> Simulated:
    """Run a schedule on the notebook's ranks, which sleep. Returns the fastest of several runs, with times in ms.

    Args:
        options: Those of `sleeping_pipeline`.
    """
    runs = []
    for _ in range(rounds):
        spans = ranks.run(sleeping_pipeline, schedule, **options)
        runs.append(Simulated([[Span(Action(*a), 1e3 * began, 1e3 * ended) for a, began, ended in s] for s in spans]))
    return min(runs, key=lambda run: run.total)


def _tag(action: Action, position: int) -> int:
    """Return a unique tag for the message that an action at a position waits for."""
    return "FB".index(action.kind) * TAGS_PER_KIND + position * 1000 + action.micro_batch
