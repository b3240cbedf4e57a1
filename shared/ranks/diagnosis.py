"""The doctor's diagnosis: turns each rank's position and outcome into sentences that a student can act on.

All functions are pure. They take positions (dicts from `doctor.position`, or None for a rank that did not answer) and
outcomes, and return text.
"""

import signal
from dataclasses import dataclass, field, replace

from shared.ranks import hang_table

_ALL_LAUNCHED = (
    "Every rank has launched the most recent collective, {}. Either it is slow, or this line waits for another call "
    "that all ranks must make, such as dist.new_group."
)
_BOTH_LAUNCHED = (
    "Both ranks have launched the most recent transfer, {}. Either it is slow, or this line waits for an earlier one."
)

_ONE_AFTER_THE_OTHER = (
    "NCCL runs a rank's sends and receives one after another, including isend and irecv, unless they are all in one "
    "dist.batch_isend_irecv()."
)
KILLED = "its process was killed (SIGKILL)"
_BY_WHOM = "either by hand or by the system because memory ran out"
_FORMS_GROUP = "every rank must call it, in the same order, including ranks that will not belong to the group."


@dataclass
class CellState:
    """What is known about a cell that runs or has failed, on all ranks."""

    targets: list[int]  # the ranks that should run the cell
    outcomes: dict  # by rank: the Outcome, if its cell has ended
    positions: dict = field(default_factory=dict)  # by rank: its position, or None if it did not answer
    deaths: dict = field(default_factory=dict)  # by rank: the exit status; a negative one is a signal
    interrupted: bool = False
    transfers: dict = field(default_factory=dict)  # by rank: its latest sends and receives, if a rank has died


def name_ranks(ranks) -> str:
    """Name ranks in a few characters: `rank 2`, `ranks 0–3`, `ranks 0, 2`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def is_deadlocked(cell: CellState) -> bool:
    """Return whether some rank waits for a collective that can never complete, so that the cell can be stopped early.

    There are three such cases: a rank whose cell has ended never launched the collective; two ranks launched different
    collectives instead of the same one; or every rank that is still running is itself waiting. Nothing is certain while
    some rank has not started the cell, because it may still be importing what the cell needs.
    """
    cell = _where_gpus_wait(cell)
    if any(position and not position["busy"] for rank, position in cell.positions.items() if rank in _pending(cell)):
        return False
    running = {rank: position for rank, position in cell.positions.items() if position and position["busy"]}
    if not running or any(position is None for position in cell.positions.values()):
        return False
    missing = {rank: absent(position, cell) for rank, position in running.items() if position["waits"] != "no"}
    if any(rank not in running for ranks in missing.values() for rank in ranks) or disagreement(cell):
        return True
    return all(missing.get(rank) and position["waits"] == "yes" for rank, position in running.items())


def waits_for_nobody(cell: CellState) -> bool:
    """Return whether ranks wait although every rank has launched what they wait for."""
    cell = _where_gpus_wait(cell)
    waiting = [position for position in cell.positions.values() if position and position["waits"] != "no"]
    return bool(waiting) and not disagreement(cell) and not any(absent(position, cell) for position in waiting)


def _pending(cell: CellState) -> set[int]:
    """Return the ranks whose cell has not ended. Some of them may not have started it."""
    return set(cell.targets) - set(cell.outcomes)


def disagreement(cell: CellState) -> dict[str, list[int]]:
    """Group the ranks by the collective they wait in, if they launched different ones under the same number.

    Returns an empty dict if the ranks agree.
    """
    launched: dict[tuple, dict[str, list[tuple[int, str]]]] = {}
    for rank, position in cell.positions.items():
        call = position["call"] if position and position["busy"] and position["waits"] != "no" else None
        if call and call["partner"] is None:
            variants = launched.setdefault((tuple(call["lane"]), call["number"]), {})
            variants.setdefault(call["must_agree"], []).append((rank, call["text"]))
    different = next((variants.values() for variants in launched.values() if len(variants) > 1), [])
    return {same[0][1]: [rank for rank, _ in same] for same in different}


def absent(position: dict, cell: CellState) -> list[int]:
    """Return the ranks that never launched the operation that the rank at this position is waiting for."""
    call = position["call"]
    if call is None:
        return []
    if call["partner"] is None:
        lanes = {rank: tuple(call["lane"]) for rank in call["group"]}
    else:  # point-to-point: the partner must launch the matching operation
        lanes = {call["partner"]: _opposite_lane(position)}
    missing = []
    for rank, lane in lanes.items():
        other = cell.positions.get(rank)
        if rank in cell.deaths or (other and rank != position["rank"] and _count(other, lane) < call["number"]):
            missing.append(rank)
    return missing or ([call["partner"]] if tags_differ(position, cell) else [])


def _opposite_lane(position: dict) -> tuple:
    """Return the lane of the operations that match the transfer of a rank at this position."""
    call = position["call"]
    return call["lane"][0], "recv" if call["op"] == "send" else "send", position["rank"]


def tags_differ(position: dict, cell: CellState) -> bool:
    """Return whether the partner of a transfer has launched enough matching ones, but too few of them with its tag."""
    call = position["call"]
    other = cell.positions.get(call["partner"]) if call and call["partner"] is not None else None
    if call is None or call["tag"] is None or not other:
        return False
    lane, launched = _opposite_lane(position), _count(position, tuple(call["lane"]), call["tag"])
    return _count(other, lane) >= call["number"] and _count(other, lane, call["tag"]) < launched


def _where_gpus_wait(cell: CellState) -> CellState:
    """Move each rank whose host runs ahead of its GPU back to its first call that another rank never launched.

    Over NCCL, the host does not wait for a collective, so it may have launched more calls that the GPU has not started.
    """
    positions = {
        rank: _put_back(position, cell) if position and position["waits"] != "no" and position["ahead"] else position
        for rank, position in cell.positions.items()
    }
    return replace(cell, positions=positions)


def _put_back(position: dict, cell: CellState) -> dict:
    missed = (call for call in position["ahead"] if absent(position | {"call": call}, cell))
    call = next(missed, position["call"])
    return position | {"call": call, "line": position["line"] or call["line"]}


def _count(position: dict, lane: tuple, tag: int | None = None) -> int:
    """Return how many operations of a lane a rank has launched: all of them, or those with a tag."""
    if tag is not None:
        return next((count for of, its, count in position["tag_counts"] if (tuple(of), its) == (lane, tag)), 0)
    return next((count for counted_lane, count in position["counts"] if tuple(counted_lane) == lane), 0)


def _tags(position: dict, lane: tuple) -> list[int]:
    return sorted(tag for of, tag, _ in position["tag_counts"] if tuple(of) == lane)


def explain(cell: CellState) -> str:
    """Explain what went wrong: first the causes in chronological order, then which rank waits for which, then a table.

    For example:

        Ranks 0, 1 wait in all_reduce #2 (float32, 3 elements) for rank 2.
        Rank 2 left the cell after all_reduce #1, launched at cell, line 1: dist.all_reduce(x). It never launched #2.

        rank  state     last call                            at
        0     waiting   all_reduce #2 (float32, 3 elements)  cell, line 9: dist.all_reduce(y)
        1     waiting   all_reduce #2 (float32, 3 elements)  cell, line 9: dist.all_reduce(y)
        2     finished  all_reduce #1 (float32, 3 elements)  cell, line 1: dist.all_reduce(x)
    """
    cell = _where_gpus_wait(cell)
    sentences = _deaths(cell) + _failures(cell)
    if not any(outcome.error and outcome.error["mismatch"] for outcome in cell.outcomes.values()):
        different = disagreement(cell)
        sentences += [_mismatch(different)] if different else _waits(cell)
    sentences += _running_lines(cell)
    if cell.interrupted and not sentences:
        sentences.append("You interrupted the cell.")
    table = table_as_text(cell)
    return "\n".join(sentences) + (table and f"\n\n{table}")


def table_as_text(cell: CellState) -> str:
    """Return the table of `explain`, or "" if it would not help."""
    cell = _where_gpus_wait(cell)
    return hang_table.as_text(_rows(cell)) if _needs_table(cell) else ""


def table_as_html(cell: CellState) -> str:
    """Return the same table for a notebook."""
    cell = _where_gpus_wait(cell)
    return hang_table.as_html(_rows(cell)) if _needs_table(cell) else ""


def _rows(cell: CellState) -> list[hang_table.Row]:
    waiting = {rank: position for rank, position in cell.positions.items() if position and rank in _pending(cell)}
    return hang_table.rows(cell, {rank: absent(position, cell) for rank, position in waiting.items()})


def _deaths(cell: CellState) -> list[str]:
    sentences = []
    for rank, status in sorted(cell.deaths.items()):
        if too_small := receives_too_small(cell, rank):
            how = too_small[0]
        elif status == -signal.SIGKILL:
            how = f"{KILLED}, {_BY_WHOM}"
        elif status == -signal.SIGABRT:
            how = (
                "its process aborted (SIGABRT) because a C++ check failed, "
                "for example because ranks passed different sizes to the same collective"
            )
        elif status < 0:
            how = f"its process was ended by signal {signal.Signals(-status).name}"
        else:
            how = f"its process exited with status {status} (os._exit, or a crash in a library)"
        line = (cell.positions.get(rank) or {}).get("line")
        sentences.append(f"Rank {rank} died: {how}." + (f" Its last line was {line}" if line else ""))
    return sentences


def how_ended(status: int | None) -> str:
    """Say how a process ended that runs no cells, as the end of a sentence. None stands for an unknown status."""
    if status == -signal.SIGKILL:
        return f"was killed (SIGKILL), {_BY_WHOM}"
    if status is not None and status < 0:
        return f"was ended by signal {signal.Signals(-status).name}"
    return "has died" if status is None else f"exited with status {status}"


def receives_too_small(cell: CellState, rank: int) -> list[str]:
    """Describe a dead rank's receives into tensors that are smaller than what their partners sent."""
    described = []
    for receive in cell.transfers.get(rank, []):
        for send in cell.transfers.get(receive.partner, []):
            matches = (receive.op, send.op) == ("recv", "send") and send.partner == rank
            if matches and send.number == receive.number and send.payload_bytes > receive.payload_bytes:
                where = f"{receive.function}, line {receive.line}".replace("<module>", "cell")
                described.append(
                    f"it received {send.payload_bytes} bytes from rank {receive.partner} into a tensor of "
                    f"{receive.payload_bytes} bytes ({where}), and gloo aborts a process that does this"
                )
    return described


def waits_for_a_dropped_handle(cell: CellState) -> bool:
    """Return whether all running ranks wait, at least one in a call that no rank missed, after a handle was dropped.

    They may not wait forever, because gloo may still complete the transfer.
    """
    running = [position for rank, position in cell.positions.items() if position is None or position["busy"]]
    return all(position and position["waits"] == "yes" for position in running) and bool(dropped_handles(cell))


def dropped_handles(cell: CellState) -> list[str]:
    """Describe the transfers whose handles were dropped, if a rank is waiting although no rank has missed its call."""
    stuck = [p for p in cell.positions.values() if p and p["busy"] and p["waits"] != "no" and not absent(p, cell)]
    if not stuck:
        return []
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, position in cell.positions.items():
        for call in position["dropped"] if position else []:
            ranks = ranks_of.setdefault((call["op"], call["line"] or "a line outside your code"), [])
            ranks += [rank] if rank not in ranks else []
    return [
        f"{name_ranks(ranks).capitalize()} dropped the handle of an i{op} without calling its wait(): {line}\n"
        "    Without its handle, the transfer may never complete, and then ranks wait for it forever."
        for (op, line), ranks in ranks_of.items()
    ]


def own_errors(cell: CellState) -> list[dict]:
    """Return the errors that ranks raised before anything was stopped, except those that other ranks caused."""
    errors = [outcome.error for outcome in cell.outcomes.values() if outcome.error]
    return [error for error in errors if not error["others_fault"]]


def _failures(cell: CellState) -> list[str]:
    """Describe the errors that ranks raised, in chronological order, without repetitions and mere consequences."""
    errors = {rank: outcome for rank, outcome in cell.outcomes.items() if outcome.error}
    causes = {rank: outcome for rank, outcome in errors.items() if not _is_consequence(outcome, cell)}
    if any(outcome.error["mismatch"] for outcome in causes.values()):
        return [_mismatch(_last_calls(cell))]
    sentences, described = [], set()
    for _rank, outcome in sorted(causes.items(), key=lambda item: item[1].ended_s):
        key = (outcome.error["message"], tuple(outcome.error["lines"]))
        if key in described:
            continue
        described.add(key)
        same = [r for r, o in causes.items() if (o.error["message"], tuple(o.error["lines"])) == key]
        who = name_ranks(same)
        sentences.append(f"{who[0].upper()}{who[1:]} failed: {outcome.error['message']}")
        sentences += [f"    {line}" for line in outcome.error["lines"]]
        if outcome.error["out_of_memory"]:
            sentences.append("    This rank ran out of memory. The other ranks did not cause this.")
            sentences.append(f"    {outcome.error['held']}")
        if outcome.error["gpu_lost"]:
            sentences.append(
                "    This process can no longer use its GPU. `nvidia-smi` shows whether other processes still can."
            )
        if outcome.error["batch_open"]:
            sentences.append(
                "    The error was raised inside a batch of sends and receives, so NCCL can no longer be used."
            )
    return sentences


def _is_consequence(outcome, cell: CellState) -> bool:
    has_other_cause = cell.deaths or any(not o.error or not o.error["others_fault"] for o in cell.outcomes.values())
    stopped = outcome.error["kind"] == "KeyboardInterrupt"
    return stopped or (outcome.error["others_fault"] and bool(has_other_cause or cell.positions))


def _last_calls(cell: CellState) -> dict[str, list[int]]:
    calls: dict[str, list[int]] = {}
    for rank, position in cell.positions.items():
        if position and position["call"]:
            calls.setdefault(position["call"]["text"], []).append(rank)
    return calls


def _mismatch(calls: dict[str, list[int]]) -> str:
    lines = "\n".join(f"    {name_ranks(ranks)}: {text}" for text, ranks in calls.items())
    rule = "All ranks must call the same collectives in the same order, with the same shapes and dtypes."
    return f"Ranks do not agree on the next collective:\n{lines}\n{rule}"


def _waits(cell: CellState) -> list[str]:
    """Describe which ranks wait in which collective for which other ranks, in one sentence per collective."""
    waiting: dict[str, list[dict]] = {}
    for position in cell.positions.values():
        if position and position["busy"] and position["waits"] != "no" and position["call"]:
            waiting.setdefault(position["call"]["text"], []).append(position)
    waiting_ranks = {position["rank"] for group in waiting.values() for position in group}
    forming = {rank for rank in waiting_ranks if cell.positions[rank]["forms_group"]}
    handles = [] if own_errors(cell) else dropped_handles(cell)  # an error also drops the handles of its line
    sentences, any_complete = list(handles), False
    for text, group in waiting.items():
        who = name_ranks([position["rank"] for position in group])
        missing = sorted({rank for position in group for rank in absent(position, cell)})
        verb = "waits" if len(group) == 1 else "wait"
        if not missing:  # the last collective is in flight, or complete and the rank waits for something else
            lines = ", ".join(dict.fromkeys(position["line"] or "a line outside your code" for position in group))
            launched = _ALL_LAUNCHED if group[0]["call"]["partner"] is None else _BOTH_LAUNCHED
            why = "" if handles else f"\n    {launched.format(text)}"
            sentences.append(f"{who[0].upper()}{who[1:]} {verb} at {lines}{why}")
            any_complete = True
            continue
        for_whom = f" for {name_ranks(missing)}" if group[0]["call"]["partner"] is None else ""
        sentences.append(f"{who[0].upper()}{who[1:]} {verb} in {text}{for_whom}.")
        sentences += [_about_tags(position, cell) for position in group if tags_differ(position, cell)]
        described = {*cell.deaths, *_still_running(cell), *(waiting_ranks - forming)}  # in sentences of their own
        sentences += [_why_absent(rank, group[0]["call"], cell) for rank in missing if rank not in described]
    everyone_waits = waiting_ranks >= set(cell.targets) - set(cell.outcomes) - set(cell.deaths)
    if everyone_waits and len(waiting) > 1 and not any_complete:
        sentences.append(
            "Each waits for a call that another waiting rank has not reached, so none of them can continue."
        )
        positions = [position for group in waiting.values() for position in group]
        if any(position["call"]["partner"] is not None and position["nccl"] for position in positions):
            sentences.append(_ONE_AFTER_THE_OTHER)
    sentences += _forming(cell)
    return list(dict.fromkeys(sentences))


def _about_tags(position: dict, cell: CellState) -> str:
    call, lane = position["call"], _opposite_lane(position)
    tag, other = call["tag"], cell.positions[call["partner"]]
    number, launched = _count(position, tuple(call["lane"]), tag), _count(other, lane, tag)
    whose = f"{lane[1]}s {'from' if lane[1] == 'recv' else 'to'} rank {position['rank']}"
    different = ", ".join(str(each) for each in _tags(other, lane) if each != tag)
    return (
        f"    This is {call['op']} number {number} with tag {tag}, but of rank {call['partner']}'s {whose}, "
        f"{launched or 'none'} had this tag. The others had tag {different}."
    )


def _forming(cell: CellState) -> list[str]:
    """Say which ranks are waiting for the others in dist.new_group, which is not counted as a collective."""
    ranks = [rank for rank, position in cell.positions.items() if position and position["forms_group"]]
    if not ranks:
        return []
    who = name_ranks(ranks)
    return [f"{who[0].upper()}{who[1:]} {'waits' if len(ranks) == 1 else 'wait'} in dist.new_group: {_FORMS_GROUP}"]


def _still_running(cell: CellState) -> set[int]:
    """Return the ranks that are executing code, rather than waiting."""
    return {
        rank for rank, position in cell.positions.items() if position and position["busy"] and position["waits"] == "no"
    }


def _why_absent(rank: int, call: dict, cell: CellState) -> str:
    position = cell.positions[rank]
    last = position["call"]
    if rank not in cell.targets:
        return f"Rank {rank} was not asked to run this cell, so it cannot take part."
    if position["forms_group"]:
        return f"Rank {rank} waits in dist.new_group instead."
    outcome = cell.outcomes.get(rank)
    verb = "failed" if outcome is not None and outcome.error else "left the cell"
    if last is None:
        return f"Rank {rank} {verb} without launching any operation in {'this cell' if verb == 'failed' else 'it'}."
    at = f", launched at {last['line']}" if last["line"] else ""
    never = (
        f"#{call['number']}"
        if call["partner"] is None
        else f"the matching {'recv' if call['op'] == 'send' else 'send'}"
    )
    return f"Rank {rank} {verb} after {last['op']} #{last['number']}{at}. It never launched {never}."


def _running_lines(cell: CellState) -> list[str]:
    """Describe the ranks that are executing code or not responding."""
    sentences = []
    for rank in cell.targets:
        position = cell.positions.get(rank)
        if rank in cell.outcomes or rank in cell.deaths:
            continue
        if rank in cell.positions and position is None:
            sentences.append(f"Rank {rank} is not responding, because it is inside a long call into a C library.")
        elif position and position["busy"] and position["waits"] == "no" and position["line"]:
            sentences.append(f"Rank {rank} is still running: {position['line']}")
    return sentences


def _needs_table(cell: CellState) -> bool:
    """Return whether a table helps, which it does only if the ranks are at different points of the code."""
    errors = [outcome.error for outcome in cell.outcomes.values() if outcome.error]
    in_step = not any(error["mismatch"] or error["others_fault"] for error in errors)
    if in_step and len(cell.outcomes) == len(cell.targets):
        return False
    return len(cell.positions) > 1 and any(position and position["call"] for position in cell.positions.values())
