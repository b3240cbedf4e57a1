"""Count how many steps messages take if each message takes one, from the launches and waits of each rank.

No clock is involved.
"""

from dataclasses import dataclass

from shared.wire import completion

Message = tuple[int, int]  # from rank, to rank


@dataclass(frozen=True)
class Event:
    """A launch of an operation, or a wait for one. A wait whose `launched` is None waits for all launches so far."""

    kind: str
    partner: int | None = None
    launched: int | None = None


class EventLog(completion.Watcher):
    """Records, in order, which operations this rank launches and which of them it waits for."""

    def __init__(self, operations: tuple[str, ...] = ("send", "recv")):
        super().__init__()
        self.operations = operations
        self.events: list[Event] = []
        self._works: list = []  # kept alive, so that no id is used twice

    def launched(self, call, work, _tensors) -> None:
        if call.op in self.operations:
            self._works.append(work)
            self.events.append(Event(call.op, partner=call.partner))

    def waited(self, work_id, _began) -> None:
        known = [index for index, work in enumerate(self._works) if id(work) == work_id]
        self.events.append(Event("wait", launched=known[-1] if known else None))


def count_steps(events_of: dict[int, list[Event]]) -> int | None:
    """Let every rank go on as far as it can. A message takes one step after both of its ends are launched.

    Returns:
        The step in which the last message completes, or None if a rank waits for a message that is never sent.
    """
    posted: dict[Message, dict[str, list[int]]] = {}
    own: dict[int, list[tuple[Message, int]]] = {rank: [] for rank in events_of}
    now, index = dict.fromkeys(events_of, 0), dict.fromkeys(events_of, 0)

    def done(message: Message, number: int) -> int | None:
        ends_of = posted[message]
        if min(len(ends_of["send"]), len(ends_of["recv"])) <= number:
            return None
        return 1 + max(ends_of["send"][number], ends_of["recv"][number])

    def advance(rank: int) -> bool:
        event = events_of[rank][index[rank]]
        if event.kind == "wait":
            waits_for = own[rank] if event.launched is None else [own[rank][event.launched]]
            ends = [done(*each) for each in waits_for]
            times = [end for end in ends if end is not None]
            if len(times) < len(ends):
                return False
            now[rank] = max([now[rank], *times])
        elif event.partner is not None:
            message = (rank, event.partner) if event.kind == "send" else (event.partner, rank)
            begun = posted.setdefault(message, {"send": [], "recv": []})[event.kind]
            own[rank].append((message, len(begun)))
            begun.append(now[rank])
        index[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, events in events_of.items():
            while index[rank] < len(events) and advance(rank):
                moved = True
    if any(index[rank] < len(events) for rank, events in events_of.items()):
        return None
    ends = [done(*each) for messages in own.values() for each in messages]
    times = [end for end in ends if end is not None]
    return max(times, default=0) if len(times) == len(ends) else None
