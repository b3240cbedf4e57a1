"""Judge a launch queue by the order in which it packs, launches and waits, with buckets that send nothing."""

import contextlib

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong

TRIES = 6

Event = tuple  # what was done to a bucket: ("pack", bucket_index, index), ("launch", bucket_index) or ("wait", …)


class Bucket:  # Students see this name in error messages.
    """Stand in for a bucket: send nothing, and log each call."""

    def __init__(self, bucket_index: int, size: int, diary: list[Event]):
        self.bucket_index, self.diary = bucket_index, diary
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(size)]

    def __getattr__(self, name: str):
        raise AttributeError(
            f"a bucket in this check has only parameters, pack(), launch() and wait(); it has no {name}"
        )

    def pack(self, index: int) -> None:
        self.diary.append(("pack", self.bucket_index, index))

    def launch(self) -> None:
        self.diary.append(("launch", self.bucket_index))

    def wait(self) -> None:
        self.diary.append(("wait", self.bucket_index))


def draw_sizes_of_buckets(attempt: Attempt) -> list[int]:
    """Draw the number of gradients in each bucket: few enough to follow by hand."""
    return [attempt.random.randint(1, 2) for _ in range(attempt.random.randint(3, 4))]


def every_gradient(sizes: list[int]) -> list[tuple[int, int]]:
    return [(bucket_index, index) for bucket_index, size in enumerate(sizes) for index in range(size)]


def events_of_add(sizes: list[int], order: list[tuple[int, int]]) -> list[list[Event]]:
    """Return what a correct queue does in each add() when gradients are added in this order."""
    missing, launched, found = list(sizes), 0, []
    for bucket_index, index in order:
        found.append([("pack", bucket_index, index)])
        missing[bucket_index] -= 1
        while launched < len(sizes) and not missing[launched]:
            found[-1].append(("launch", launched))
            launched += 1
    return found


def described(events: list[Event]) -> str:
    if not events:
        return "nothing"
    return ", ".join(
        f"{verb} bucket {index}" + "".join(f" (gradient {one})" for one in rest) for verb, index, *rest in events
    )


def probe_queue(queue_class, sizes: list[int], rounds: list[list[tuple[int, int]]]) -> list[list[list[Event]]]:
    """Return, for each round, what each add() did and, last, what finish() did."""
    diary: list[Event] = []
    queue = queue_class([Bucket(bucket_index, size, diary) for bucket_index, size in enumerate(sizes)])
    found = []
    for turn, order in enumerate(rounds, 1):
        found.append([])
        for step in [*order, None]:
            diary.clear()
            with _noting(turn, step):
                queue.finish() if step is None else queue.add(*step)
            found[-1].append(diary[:])
    return found


@contextlib.contextmanager
def _noting(turn: int, step: tuple[int, int] | None):
    """Add a note to an error: in which round it was raised, and by which call."""
    try:
        yield
    except Exception as error:
        before = f"; finish() had ended round {turn - 1} without an error" if turn > 1 else ""
        error.add_note(f"(This was {'finish()' if step is None else f'add{step}'} in round {turn}{before}.)")
        raise


def _try_queue(attempt: Attempt) -> tuple[list[int], list[list[tuple[int, int]]], list[list[list[Event]]]]:
    """Return the sizes of the buckets, what was added in each round, and what the queue did in each round."""
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    rounds = []
    for left_out in (0, attempt.random.randint(1, len(every) - 1), len(every), 0):
        rounds.append(attempt.random.sample(every, len(every) - left_out))
    context = f"buckets of {sizes} gradients, {len(rounds)} rounds of add(…), each followed by finish()"
    return sizes, rounds, attempt.run(probe_queue, sizes, rounds, context=context)[0]


def launched_in_order_and_early(attempt: Attempt) -> None:
    for _ in range(TRIES):
        sizes, rounds, found = _try_queue(attempt)
        for turn, (order, did) in enumerate(zip(rounds, found, strict=True), 1):
            for step, expected in enumerate(events_of_add(sizes, order)):
                if did[step] != expected:
                    alone = attempt.run(probe_queue, sizes, [order])[0][0][step]  # the same round on a new queue
                    added = ", ".join(map(str, order[: step + 1]))
                    context = (
                        f"buckets of {sizes} gradients, round {turn}: after adding {added}, the queue did "
                        f"{described(did[step])}"
                    )
                    raise Wrong(f"{context}; expected {described(expected)}", _hint_on(alone, expected))


def _hint_on(did: list[Event], expected: list[Event]) -> str:
    """Hint at the cause, given what a new queue did in the round in which the queue was wrong."""
    if did == expected:
        return "Hint: which state must be reset when a round ends?"
    if any(event[0] == "wait" for event in did):
        return "Hint: add(…) is called during backward(). Which method should wait instead?"
    if [event for event in did if event[0] == "pack"] != expected[:1]:
        return "Hint: which gradient is ready now? Each one is packed once, when it is added."
    if sorted(did) == sorted(expected):
        return ""
    if len(did) >= len(expected) or set(did) - set(expected):
        return "Hint: is it this bucket's turn to be launched?"
    if any(event[0] == "launch" for event in did):
        return "Hint: which other bucket can be launched, now that this one has been?"
    return "Hint: how do you find out that a bucket is full, and that it is its turn?"


def finish_completes_and_begins_anew(attempt: Attempt) -> None:
    for _ in range(TRIES):
        sizes, rounds, found = _try_queue(attempt)
        for turn, (order, did) in enumerate(zip(rounds, found, strict=True), 1):
            before, last = [event for events in did[:-1] for event in events], did[-1]
            context = (
                f"buckets of {sizes} gradients, round {turn}: after {len(order)} of {sum(sizes)} gradients were added, "
                f"finish() did {described(last)}"
            )
            judge_finish(sizes, before, last, context)


def judge_finish(sizes: list[int], before: list[Event], last: list[Event], context: str) -> None:
    """Judge a whole round: what was done before finish(), and what finish() did.

    Raises:
        Wrong: Unless the rest is packed, then launched in order, and each bucket is waited for once, after all of them
            were launched.
    """
    whole, bucket_indices = before + last, range(len(sizes))
    every = [("pack", *each) for each in every_gradient(sizes)]
    if sorted(event for event in whole if event[0] == "pack") != every:
        raise Wrong(f"{context}; expected every gradient to be packed once", "Hint: which gradients are still missing?")
    launches = [event[1] for event in whole if event[0] == "launch"]
    if launches != list(bucket_indices):
        raise Wrong(
            f"{context}; buckets were launched in the order {launches}", "Hint: which buckets are not launched yet?"
        )
    for launched in bucket_indices:
        if any(whole.index(("launch", launched)) < whole.index(event) for event in every if event[1] == launched):
            raise Wrong(f"{context}; bucket {launched} was launched before all its gradients were packed")
    waits = [position for position, event in enumerate(whole) if event[0] == "wait"]
    if sorted(whole[position][1] for position in waits) != list(bucket_indices):
        raise Wrong(
            f"{context}; expected one wait for each bucket", "Hint: which line waits for the buckets launched earlier?"
        )
    if waits[0] < whole.index(("launch", len(sizes) - 1)):
        hint = "Hint: which collectives could be in flight at the same time?"
        raise Wrong(f"{context}; it waited before the last bucket was launched", hint)
