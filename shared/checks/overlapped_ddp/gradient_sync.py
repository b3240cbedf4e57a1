"""Judge how hooks feed the queue: each gradient is added when it is complete, and a second one is rejected."""

from shared.checks.engine.framework import Attempt, Wrong
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
        """Run a backward through these parameters, and return the log, including when each gradient was complete."""
        self.diary.clear()
        sum(self.buckets[bucket_index].parameters[index].sum() for bucket_index, index in used).backward()
        return self.diary[:]

    def finish(self) -> list[Event]:
        self.diary.clear()
        self.sync.finish()
        return self.diary[:]


def probe_steps(sync_class, sizes: list[int], steps: list[tuple[bool, list[tuple[int, int]]]]) -> list[dict]:
    """Take steps of (enabled, used parameters). Return what backward() and finish() did, and `pending` after each."""
    logged, found = LoggedSync(sync_class, sizes), []
    for enabled, used in steps:
        logged.sync.enabled = enabled
        step = {"backward": logged.backward(used), "pending": logged.sync.pending}
        found.append(step | {"finish": logged.finish(), "pending at the end": logged.sync.pending})
    return found


def probe_second(sync_class, sizes: list[int], enabled: bool) -> str:
    """Run backward() twice before finish(). Return the message of the second one's RuntimeError, or an empty string."""
    logged, every = LoggedSync(sync_class, sizes), every_gradient(sizes)
    logged.backward(every)
    logged.sync.enabled = enabled
    try:
        logged.backward(every)
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
    steps = [(True, every), (True, some), (True, every)]
    for number, step in enumerate(attempt.run(probe_steps, sizes, steps)[0], 1):
        order = [event[1:] for event in step["backward"] if event[0] == "ready"]
        done = [event for event in step["backward"] if event[0] != "ready"]
        expected = []
        for gradient, events in zip(order, events_of_add(sizes, order), strict=True):
            expected += [("ready", *gradient), *events]
        context = f"buckets of {sizes} gradients, step {number}"
        if step["backward"] != expected:
            raise Wrong(
                f"{context}: backward() did {described(step['backward'])}; expected {described(expected)}",
                _HINT_ON_HOOKS,
            )
        judge_finish(sizes, done, step["finish"], f"{context}: finish() did {described(step['finish'])}")


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


def a_second_gradient_is_rejected(attempt: Attempt) -> None:
    sizes = draw_sizes_of_buckets(attempt)
    for enabled in (True, False):
        message = attempt.run(probe_second, sizes, enabled)[0]
        context = f"a second backward() before finish(), with enabled={enabled},"
        if not message:
            hint = "Hint: .grad is a slice of a bucket that may be in flight. What has a second backward() done to it?"
            raise Wrong(f"{context} is accepted; expected a RuntimeError", hint)
        if "finish_gradient_sync" not in message and "no_sync" not in message:
            hint = "The message should say what to do instead, because its reader may not know about hooks and buckets."
            raise Wrong(f"{context} is rejected with {message[:80]!r}", hint)
