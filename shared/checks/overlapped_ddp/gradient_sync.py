"""Judge how hooks feed the queue: each gradient is added when it is complete, and a second one is rejected."""

import itertools

from shared.checks.engine.attempts import Attempt
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

_HINT_ON_HOOKS = "Hint: which method of the queue adds a gradient, and which two indices does it take?"
_HINT_ON_WAITS = "Hint: what waits here, although backward has not ended?"
_HINT_ON_IDLE_RANKS = "Hint: another rank may have run backward(). What does it wait for if this rank launches nothing?"
_HINT_ON_ENABLED = "Hint: which of your methods check `enabled`?"
_HINT_ON_PENDING = "Hint: which methods change `pending`, and should they when `enabled` is False?"


class LoggedSync:
    """Run a GradientSync over buckets that send nothing, and log what backward() and finish() do."""

    def __init__(self, sync_class, sizes: list[int]):
        self.diary: list[Event] = []
        self.buckets = [Bucket(bucket_index, size, self.diary) for bucket_index, size in enumerate(sizes)]
        for bucket_index, index in every_gradient(sizes):
            ready = ("ready", bucket_index, index)
            parameter = self.buckets[bucket_index].parameters[index]
            parameter.register_post_accumulate_grad_hook(lambda _, ready=ready: self.diary.append(ready))
        self.sync = sync_class(self.buckets)

    def backward(self, used: list[tuple[int, int]]) -> list[Event]:
        """Run a backward through these parameters, if any. Returns the log, with when each gradient was complete."""
        self.diary.clear()
        if used:
            sum(self.buckets[bucket_index].parameters[index].sum() for bucket_index, index in used).backward()
        return self.diary[:]

    def finish(self) -> list[Event]:
        self.diary.clear()
        self.sync.finish()
        return self.diary[:]


def probe_steps(sync_class, sizes: list[int], steps: list[tuple[bool, list[tuple[int, int]]]]) -> list[dict]:
    """Take steps of (enabled, used parameters). Return what backward() and finish() did, and the attributes then."""
    logged, found = LoggedSync(sync_class, sizes), []
    for enabled, used in steps:
        logged.sync.enabled = enabled
        step = {"backward": logged.backward(used), "pending": logged.sync.pending}
        step |= {"finish": logged.finish(), "pending at the end": logged.sync.pending}
        found.append(step | {"enabled at the end": logged.sync.enabled})
    return found


def probe_second(sync_class, sizes: list[int], used: list[tuple[int, int]], enabled: bool) -> str:
    """Run backward() twice before finish(). Return the message of the second one's RuntimeError, or an empty string."""
    logged = LoggedSync(sync_class, sizes)
    logged.backward(used)
    logged.sync.enabled = enabled
    try:
        logged.backward(used)
    except RuntimeError as error:
        return str(error)
    except Exception as error:
        error.add_note("(This was a second backward() before finish(). It should raise a RuntimeError.)")
        raise
    return ""


def gradients_are_added_in_backward(attempt: Attempt) -> None:
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    some = attempt.random.sample(every, attempt.random.randint(1, len(every) - 1))
    steps = [(True, every), (True, some), (True, []), (True, every)]
    for number, ((_, used), step) in enumerate(zip(steps, attempt.run(probe_steps, sizes, steps)[0], strict=True), 1):
        order = [event[1:] for event in step["backward"] if event[0] == "ready"]
        done = [event for event in step["backward"] if event[0] != "ready"]
        expected = []
        for gradient, events in zip(order, events_of_add(sizes, order), strict=True):
            expected += [("ready", *gradient), *events]
        context = f"buckets of {sizes} gradients, step {number}" + ", without a backward()" * (not used)
        if step["backward"] != expected:
            when, did, wanted = _first_difference(step["backward"], expected)
            hint = _HINT_ON_WAITS if any(event[0] == "wait" for event in did) else _HINT_ON_HOOKS
            raise Wrong(f"{context}{when}: backward() did {described(did)}; expected {described(wanted)}", hint)
        context += f": finish() did {described(step['finish'])}"
        if not used and not step["finish"]:
            raise Wrong(f"{context}; expected it to launch every bucket", _HINT_ON_IDLE_RANKS)
        judge_finish(sizes, done, step["finish"], context)


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
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    enabled = (True, False, False, True, True)
    for number, step in enumerate(attempt.run(probe_steps, sizes, [(each, every) for each in enabled])[0], 1):
        context = f"step {number}, where enabled is {enabled[number - 1]}"
        done = [event for event in (*step["backward"], *step["finish"]) if event[0] != "ready"]
        if done and not enabled[number - 1]:
            raise Wrong(f"{context}: {described(done)}; expected nothing", _HINT_ON_ENABLED)
        if not done and enabled[number - 1]:
            raise Wrong(f"{context}: nothing was packed or launched", _HINT_ON_ENABLED)
        if step["pending"] is not True:
            raise Wrong(f"{context}: pending is {step['pending']} after backward(); expected True", _HINT_ON_PENDING)
        if step["pending at the end"] is enabled[number - 1]:
            was, expected = step["pending at the end"], not enabled[number - 1]
            raise Wrong(f"{context}: pending is {was} after finish(); expected {expected}", _HINT_ON_PENDING)
        if step["enabled at the end"] is not enabled[number - 1]:
            was = step["enabled at the end"]
            raise Wrong(f"{context}: enabled is {was} after finish()", "Hint: which methods may change `enabled`?")


def a_second_gradient_is_rejected(attempt: Attempt) -> None:
    """Try also a gradient whose bucket is not full, so that it is packed but not in flight."""
    sizes = [*draw_sizes_of_buckets(attempt), 2]
    one = [(len(sizes) - 1, attempt.random.randrange(2))]
    for used, enabled in itertools.product((every_gradient(sizes), one), (True, False)):
        message = attempt.run(probe_second, sizes, used, enabled)[0]
        context = f"a second backward() before finish(), with enabled={enabled},"
        if used is one:
            context += " through a parameter whose bucket is not full,"
        if not message:
            hint = "Hint: .grad is already packed into its bucket. What has a second backward() done to it?"
            raise Wrong(f"{context} is accepted; expected a RuntimeError", hint)
        if "finish_gradient_sync" not in message and "no_sync" not in message:
            hint = "The message should say what to do instead, because its reader may not know about hooks and buckets."
            raise Wrong(f"{context} is rejected with {message[:80]!r}", hint)
