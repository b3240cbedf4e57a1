"""Judge how hooks feed the queue, and when it is finished: when backward ends, or in finish()."""

import itertools
from dataclasses import dataclass
from typing import Any

from torch.autograd import Variable

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import total_of
from shared.checks.engine.failures import Wrong
from shared.checks.overlapped_ddp.launch_queue import (
    Bucket,
    Event,
    described,
    draw_sizes_of_buckets,
    events_of_add,
    every_gradient,
    judge_finish,
)

_HINT_ON_HOOKS = (
    "Hint: does 4.1 pass? If so, which method of the queue adds a gradient, and which two indices does it take?"
)
_HINT_ON_WAITS = "Hint: what waits here, although backward has not ended?"
_HINT_ON_THE_END = "Hint: what do you ask at_end_of_backward() to call, and when do you ask?"
_HINT_ON_IDLE_RANKS = "Hint: another rank may have run backward(). What does it wait for if this rank launches nothing?"
_HINT_ON_DONE = "Hint: which attribute tells finish() that backward has averaged the gradients, and who resets it?"
_HINT_ON_ENABLED = "Hint: which of your methods check `enabled`?"
_HINT_ON_PENDING = "Hint: which methods change `pending`, and should they when `enabled` is False?"
_HINT_ON_ACCUMULATED = "Hint: these gradients came after the last synchronization. Which attribute tells finish() so?"

END = ("end",)  # in a log: autograd has called all hooks of a backward


@dataclass(frozen=True)
class Step:
    """What happens between two calls of finish(), or without it."""

    used: list[tuple[int, int]]  # the parameters that backward goes through; no backward if there are none
    enabled: bool = True
    finishes: bool = True


@dataclass
class Stepped:
    """What happened in one step, and the attributes of the GradientSync then."""

    backward: list[Event]
    pending: Any  # after backward()
    finish: list[Event]
    pending_at_end: Any
    enabled_at_end: Any


class LoggedSync:
    """Run a GradientSync over buckets that send nothing, and log what backward() and finish() do."""

    def __init__(self, sync_class, sizes: list[int]):
        self.diary: list[Event] = []
        self.has_ended = True
        self.buckets = [Bucket(bucket_index, size, self.diary) for bucket_index, size in enumerate(sizes)]
        for bucket_index, index in every_gradient(sizes):
            ready = ("ready", bucket_index, index)
            parameter = self.buckets[bucket_index].parameters[index]
            parameter.register_post_accumulate_grad_hook(lambda _, ready=ready: self._note(ready))
        self.sync = sync_class(self.buckets)  # its hooks come after ours, and so does what it queues

    def _note(self, ready: Event) -> None:
        if self.has_ended:
            self.has_ended = False
            Variable._execution_engine.queue_callback(self._end)
        self.diary.append(ready)

    def _end(self) -> None:
        self.has_ended = True
        self.diary.append(END)

    def backward(self, used: list[tuple[int, int]]) -> list[Event]:
        """Run a backward through these parameters, if any. Returns the log, with when each gradient was complete."""
        self.diary.clear()
        if used:
            total_of(self.buckets[bucket_index].parameters[index].sum() for bucket_index, index in used).backward()
        return self.diary[:]

    def finish(self) -> list[Event]:
        self.diary.clear()
        self.sync.finish()
        return self.diary[:]


def probe_steps(sync_class, sizes: list[int], steps: list[Step]) -> list[Stepped]:
    logged, found = LoggedSync(sync_class, sizes), []
    for step in steps:
        logged.sync.enabled = step.enabled
        backward, pending = logged.backward(step.used), logged.sync.pending
        finish = logged.finish() if step.finishes else []
        found.append(Stepped(backward, pending, finish, logged.sync.pending, logged.sync.enabled))
    return found


def gradients_are_added_in_backward(attempt: Attempt) -> None:
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    some = attempt.random.sample(every, attempt.random.randint(1, len(every) - 1))
    _judge_backwards(attempt, sizes, [Step(every)])
    _judge_backwards(attempt, sizes, [Step(every), Step(some, finishes=False), Step(every)])


def _judge_backwards(attempt: Attempt, sizes: list[int], steps: list[Step]) -> None:
    for number, did in enumerate(attempt.run(probe_steps, sizes, steps)[0], 1):
        context = f"buckets of {sizes} gradients, step {number}"
        working, last = _split(did.backward)
        order = [event[1:] for event in working if event[0] == "ready"]
        expected = []
        for gradient, events in zip(order, events_of_add(sizes, order), strict=True):
            expected += [("ready", *gradient), *events]
        if working != expected:
            when, events, wanted = _first_difference(working, expected)
            hint = _HINT_ON_WAITS if any(event[0] == "wait" for event in events) else _HINT_ON_HOOKS
            raise Wrong(f"{context}{when}: backward() did {described(events)}; expected {described(wanted)}", hint)
        if not last:
            evidence = f"{context}: nothing happened when backward() ended; expected it to launch what is left and wait"
            raise Wrong(evidence, _HINT_ON_THE_END)
        done = [event for event in working if event[0] != "ready"]
        judge_finish(sizes, done, last, f"{context}: when backward() ended, it did {described(last)}")
        if did.finish:
            evidence = f"{context}: finish() did {described(did.finish)}, although backward() had synchronized"
            raise Wrong(f"{evidence}; expected nothing", _HINT_ON_DONE)


def finish_takes_part_without_a_backward(attempt: Attempt) -> None:
    """Try steps without a backward(), after one that finish() has ended."""
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    steps = [Step([]), Step(every), Step([]), Step([])]
    for number, (step, did) in enumerate(zip(steps, attempt.run(probe_steps, sizes, steps)[0], strict=True), 1):
        if step.used:
            continue
        context = f"buckets of {sizes} gradients, step {number}, without a backward(): "
        context += f"finish() did {described(did.finish)}"
        if not did.finish:
            raise Wrong(f"{context}; expected it to launch every bucket", _HINT_ON_IDLE_RANKS)
        judge_finish(sizes, [], did.finish, context)


def _split(diary: list[Event]) -> tuple[list[Event], list[Event]]:
    """Split the log of a backward() into what hooks did and what was done when it ended."""
    end = diary.index(END)
    return diary[:end], diary[end + 1 :]


def _first_difference(did: list[Event], expected: list[Event]) -> tuple[str, list[Event], list[Event]]:
    """Find the first gradient where they differ. Returns its name in words, what was done, and what was expected."""

    def by_gradient(events: list[Event]) -> list[list[Event]]:
        begins = [0, *(position for position, event in enumerate(events) if event[0] == "ready"), len(events)]
        return [events[begin:end] for begin, end in itertools.pairwise(begins)]

    pairs = itertools.zip_longest(by_gradient(did), by_gradient(expected), fillvalue=[])
    one, other = next((one, other) for one, other in pairs if one != other)
    when = f", when gradient {other[0][2]} of bucket {other[0][1]} was ready" if other else ""
    return when, [event for event in one if event[0] != "ready"], other[1:]


def it_does_nothing_when_disabled(attempt: Attempt) -> None:
    """Try also gradients that accumulate after a synchronization, which finish() must average."""
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    steps = [Step(every), Step(every, enabled=False), Step(every, enabled=False), Step(every), Step(every)]
    steps += [Step(every, finishes=False), Step(every, enabled=False), Step([])]
    for number, (step, did) in enumerate(zip(steps, attempt.run(probe_steps, sizes, steps)[0], strict=True), 1):
        context = f"step {number}, where enabled is {step.enabled}"
        done = [event for event in (*did.backward, *did.finish) if event[0] not in ("ready", "end")]
        if done and not step.enabled:
            raise Wrong(f"{context}: {described(done)}; expected nothing", _HINT_ON_ENABLED)
        if not step.used and not done:
            evidence = f"{context}: finish() did nothing, although a backward() with enabled=False came before it"
            raise Wrong(f"{evidence}; expected it to launch every bucket", _HINT_ON_ACCUMULATED)
        if not done and step.enabled:
            raise Wrong(f"{context}: nothing was packed or launched", _HINT_ON_ENABLED)
        for when, pending in {"backward()": did.pending, "finish()": did.pending_at_end}.items():
            if bool(pending) is step.enabled and (step.used or when == "finish()"):
                expected = not step.enabled
                raise Wrong(f"{context}: pending is {pending} after {when}; expected {expected}", _HINT_ON_PENDING)
        if did.enabled_at_end is not step.enabled:
            was = did.enabled_at_end
            raise Wrong(f"{context}: enabled is {was} after finish()", "Hint: which methods may change `enabled`?")
