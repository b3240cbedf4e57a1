"""The doctor's diagnosis: turns each rank's position and outcome into sentences that a student can act on.

All functions are pure. They take positions (dicts from `doctor.position`, or None for a rank that did not answer) and
outcomes, and return text.
"""

import signal
from dataclasses import dataclass, field

_ALL_CAME = (
    "Every rank has launched the last collective, {}. Either it is slow, or this line waits for another call "
    "that all ranks must make, such as dist.new_group."
)


@dataclass
class Case:
    """Everything that is known when a cell has failed."""

    targets: list[int]  # the ranks that should run the cell
    outcomes: dict  # by rank: the Outcome, if its cell has ended
    positions: dict = field(default_factory=dict)  # by rank: its position, or None if it did not answer
    deaths: dict = field(default_factory=dict)  # by rank: the exit status; a negative one is a signal
    interrupted: bool = False


def name_ranks(ranks) -> str:
    """Name ranks in a few characters: `rank 2`, `ranks 0–3`, `ranks 0, 2`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def is_deadlocked(case: Case) -> bool:
    """Tell whether some rank waits for a collective that can never complete, so that the deadline need not pass.

    There are three such cases: a rank whose cell has ended never launched the collective; two ranks launched different
    ones in its place; or every rank that is still running is itself waiting. Nothing is certain while a rank has yet to
    begin, because it may still be importing what the cell needs.
    """
    if any(found and not found["busy"] for rank, found in case.positions.items() if rank in _pending(case)):
        return False
    running = {rank: found for rank, found in case.positions.items() if found is None or found["busy"]}
    if not running or any(found is None for found in running.values()):
        return False
    missing = {rank: absent(found, case) for rank, found in running.items() if found["waits"] != "no"}
    if any(rank not in running for ranks in missing.values() for rank in ranks) or disagreement(case):
        return True
    return all(missing.get(rank) and found["waits"] == "yes" for rank, found in running.items())


def _pending(case: Case) -> set[int]:
    """Return the ranks whose cell has not ended. Some of them may not have begun."""
    return set(case.targets) - set(case.outcomes)


def disagreement(case: Case) -> dict[str, list[int]]:
    """Group the ranks by the collective they wait in, if they launched different collectives as the same number.

    Returns an empty dict if the ranks agree.
    """
    sides: dict[tuple, dict[str, list[tuple[int, str]]]] = {}
    for rank, found in case.positions.items():
        if found and found["busy"] and found["waits"] != "no" and found["call"] and found["call"]["partner"] is None:
            place = (tuple(found["call"]["lane"]), found["call"]["number"])
            same = sides.setdefault(place, {}).setdefault(found["call"]["must_agree"], [])
            same.append((rank, found["call"]["text"]))
    apart = next((found.values() for found in sides.values() if len(found) > 1), [])
    return {found[0][1]: [rank for rank, _ in found] for found in apart}


def absent(position: dict, case: Case) -> list[int]:
    """Return the ranks that never launched the collective in which one rank waits."""
    call = position["call"]
    if call is None:
        return []
    if call["partner"] is None:
        lanes = {rank: tuple(call["lane"]) for rank in call["group"]}
    else:  # point-to-point: the partner must launch the matching operation
        opposite = "recv" if call["op"] == "send" else "send"
        lanes = {call["partner"]: (call["lane"][0], opposite, position["rank"])}
    missing = []
    for rank, lane in lanes.items():
        found = case.positions.get(rank)
        if rank in case.deaths or (found and rank != position["rank"] and _count(found, lane) < call["number"]):
            missing.append(rank)
    return missing


def _count(position: dict, lane: tuple) -> int:
    return next((count for found, count in position["counts"] if tuple(found) == lane), 0)


def explain(case: Case) -> str:
    """Explain what went wrong: first causes in order of time, then which rank waits for which, then a table."""
    sentences = _deaths(case) + _failures(case)
    if not any(outcome.error and outcome.error["mismatch"] for outcome in case.outcomes.values()):
        sides = disagreement(case)
        sentences += [_mismatch(sides)] if sides else _waits(case)
    sentences += _loops(case)
    if case.interrupted and not sentences:
        sentences.append("You interrupted the cell.")
    table = _table(case) if _worth_a_table(case) else ""
    return "\n".join(sentences) + table


def _deaths(case: Case) -> list[str]:
    said = []
    for rank, status in sorted(case.deaths.items()):
        if status == -signal.SIGKILL:
            how = "it was killed with SIGKILL, by hand or by the system because memory ran out"
        elif status == -signal.SIGABRT:
            how = "it aborted (SIGABRT): a C++ check failed, for example because of different sizes in one collective"
        elif status < 0:
            how = f"it was ended by the signal {signal.Signals(-status).name}"
        else:
            how = f"it exited with status {status} (os._exit, or a crash in a library)"
        line = (case.positions.get(rank) or {}).get("line")
        said.append(f"Rank {rank} died: {how}." + (f" Its last line was {line}" if line else ""))
    return said


def _failures(case: Case) -> list[str]:
    """Describe the errors that ranks raised, in order of time, equal ones together, without mere consequences."""
    errors = {rank: outcome for rank, outcome in case.outcomes.items() if outcome.error}
    causes = {rank: outcome for rank, outcome in errors.items() if not _is_consequence(outcome, case)}
    if any(outcome.error["mismatch"] for outcome in causes.values()):
        return [_mismatch(_last_calls(case))]
    said, told = [], set()
    for _rank, outcome in sorted(causes.items(), key=lambda item: item[1].ended_s):
        key = (outcome.error["message"], tuple(outcome.error["lines"]))
        if key in told:
            continue
        told.add(key)
        same = [r for r, o in causes.items() if (o.error["message"], tuple(o.error["lines"])) == key]
        who = name_ranks(same)
        said.append(f"{who[0].upper()}{who[1:]} failed: {outcome.error['message']}")
        said += [f"    {line}" for line in outcome.error["lines"]]
        if outcome.error["out_of_memory"]:
            said.append("    This rank ran out of memory. The other ranks did not cause that.")
            said.append(f"    {outcome.error['held']}")
        if outcome.error["gpu_lost"]:
            said.append("    This process cannot use its GPU any more. `nvidia-smi` shows whether others can.")
    return said


def _is_consequence(outcome, case: Case) -> bool:
    someone_else = case.deaths or any(not o.error or not o.error["others_fault"] for o in case.outcomes.values())
    stopped = outcome.error["kind"] == "KeyboardInterrupt"
    return stopped or (outcome.error["others_fault"] and bool(someone_else or case.positions))


def _last_calls(case: Case) -> dict[str, list[int]]:
    calls: dict[str, list[int]] = {}
    for rank, found in case.positions.items():
        if found and found["call"]:
            calls.setdefault(found["call"]["text"], []).append(rank)
    return calls


def _mismatch(calls: dict[str, list[int]]) -> str:
    sides = "\n".join(f"    {name_ranks(ranks)}: {text}" for text, ranks in calls.items())
    rule = "All ranks must call the same collectives in the same order, with the same shapes and dtypes."
    return f"Ranks do not agree on the next collective:\n{sides}\n{rule}"


def _waits(case: Case) -> list[str]:
    """Say which ranks wait in which collective for which others, in one sentence per collective."""
    waiting: dict[str, list[dict]] = {}
    for found in case.positions.values():
        if found and found["busy"] and found["waits"] != "no" and found["call"]:
            waiting.setdefault(found["call"]["text"], []).append(found)
    who_waits = {found["rank"] for group in waiting.values() for found in group}
    loops = {rank for rank, found in case.positions.items() if found and found["busy"] and found["waits"] == "no"}
    said, somebody_is_served = [], False
    for text, group in waiting.items():
        who = name_ranks([found["rank"] for found in group])
        missing = sorted({rank for found in group for rank in absent(found, case)})
        verb = "waits" if len(group) == 1 else "wait"
        if not missing:  # the last collective is in flight, or complete and the rank waits for something else
            lines = ", ".join(dict.fromkeys(found["line"] or "a line outside your code" for found in group))
            said.append(f"{who[0].upper()}{who[1:]} {verb} at {lines}\n    {_ALL_CAME.format(text)}")
            somebody_is_served = True
            continue
        for_whom = f" for {name_ranks(missing)}" if group[0]["call"]["partner"] is None else ""
        said.append(f"{who[0].upper()}{who[1:]} {verb} in {text}{for_whom}.")
        told = set(case.deaths) if group[0]["call"]["partner"] is None else {*case.deaths, *who_waits}
        said += [_why_absent(rank, group[0]["call"], case) for rank in missing if rank not in told | loops]
    everyone_waits = who_waits >= set(case.targets) - set(case.outcomes) - set(case.deaths)
    if everyone_waits and len(waiting) > 1 and not somebody_is_served:
        said.append("Each waits for a call that another waiting rank has not reached, so none of them can continue.")
    return list(dict.fromkeys(said))


def _why_absent(rank: int, call: dict, case: Case) -> str:
    found = case.positions[rank]
    last = found["call"]
    if rank not in case.targets:
        return f"Rank {rank} was not asked to run this cell, so it cannot take part."
    if found["busy"] and found["waits"] != "no" and last:
        return f"Rank {rank} is in {last['text']} instead."
    outcome = case.outcomes.get(rank)
    verb = "failed" if outcome is not None and outcome.error else "left the cell"
    if last is None:
        return f"Rank {rank} {verb} without launching any collective."
    at = f", launched at {last['line']}" if last["line"] else ""
    never = (
        f"#{call['number']}"
        if call["partner"] is None
        else f"the matching {'recv' if call['op'] == 'send' else 'send'}"
    )
    return f"Rank {rank} {verb} after {last['op']} #{last['number']}{at}. It never launched {never}."


def _loops(case: Case) -> list[str]:
    said = []
    for rank in case.targets:
        found = case.positions.get(rank)
        if rank in case.outcomes or rank in case.deaths:
            continue
        if rank in case.positions and found is None:
            said.append(f"Rank {rank} does not answer: it is inside a long call of a C library.")
        elif found and found["busy"] and found["waits"] == "no" and found["line"]:
            said.append(f"Rank {rank} is still running: {found['line']}")
    return said


def _worth_a_table(case: Case) -> bool:
    """Tell whether a table helps: only if the ranks are at different points of the code."""
    told = [outcome.error for outcome in case.outcomes.values() if outcome.error]
    in_step = not any(error["mismatch"] or error["others_fault"] for error in told)
    if in_step and len(case.outcomes) == len(case.targets):
        return False
    return len(case.positions) > 1 and any(found and found["call"] for found in case.positions.values())


def _table(case: Case) -> str:
    rows = [("rank", "state", "last collective", "at")]
    for rank in sorted(set(case.positions) | set(case.deaths)):
        found = case.positions.get(rank)
        call = found["call"] if found else None
        line = (found["line"] if found and found["busy"] else call and call["line"]) or "–"
        rows.append(
            (
                str(rank),
                _state(rank, found, case),
                call["text"] if call else "none",
                line if len(line) <= 48 else line[:47] + "…",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n\n" + "\n".join(lines)


def _state(rank: int, found: dict | None, case: Case) -> str:
    outcome = case.outcomes.get(rank)
    if rank in case.deaths:
        return "died"
    if rank not in case.targets:
        return "not asked"
    if outcome is not None:
        return "failed" if outcome.error else "finished"
    if found is None:
        return "no answer"
    return "running" if found["waits"] == "no" else "waiting"
