"""Judging how hooks feed the queue: a gradient is added once it is complete, and a second one is rejected."""

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

_LOOK_AT_HOOKS = "Look at: which method of the queue takes a gradient, and with which two indices?"
_LOOK_AT_ENABLED = "Look at: which of the methods ask whether enabled is True?"
_LOOK_AT_PENDING = "Look at: which methods change pending, and do they also when enabled is False?"


class Watched:
    """A GradientSync over buckets that send nothing, and the diary of what backward() and finish() did."""

    def __init__(self, sync_class, sizes: list[int]):
        self.diary: list[Event] = []
        self.buckets = [Bucket(bucket_index, size, self.diary) for bucket_index, size in enumerate(sizes)]
        for bucket_index, index in every_gradient(sizes):
            ready = ("ready", bucket_index, index)
            parameter = self.buckets[bucket_index].parameters[index]
            parameter.register_post_accumulate_grad_hook(lambda _, ready=ready: self.diary.append(ready))
        self.sync = sync_class(self.buckets)

    def backward(self, used: list[tuple[int, int]]) -> list[Event]:
        """Run a backward through these parameters. Returns what was done, each gradient's completion included."""
        self.diary.clear()
        sum(self.buckets[bucket_index].parameters[index].sum() for bucket_index, index in used).backward()
        return self.diary[:]

    def finish(self) -> list[Event]:
        self.diary.clear()
        self.sync.finish()
        return self.diary[:]


def probe_steps(sync_class, sizes: list[int], steps: list[tuple[bool, list[tuple[int, int]]]]) -> list[dict]:
    """Take steps of (enabled, used parameters). Returns what backward() and finish() did, and pending after each."""
    watched, found = Watched(sync_class, sizes), []
    for enabled, used in steps:
        watched.sync.enabled = enabled
        step = {"backward": watched.backward(used), "pending": watched.sync.pending}
        found.append(step | {"finish": watched.finish(), "pending at the end": watched.sync.pending})
    return found


def probe_second(sync_class, sizes: list[int], enabled: bool) -> str:
    """Run backward() twice before finish(). Returns what the second one raised, or nothing."""
    watched, every = Watched(sync_class, sizes), every_gradient(sizes)
    watched.backward(every)
    watched.sync.enabled = enabled
    try:
        watched.backward(every)
    except RuntimeError as error:
        return str(error)
    return ""


def gradients_are_added_in_backward(attempt: Attempt) -> None:
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    some = attempt.random.sample(every, attempt.random.randint(1, len(every) - 1))
    steps = [(True, every), (True, some), (True, every)]
    for number, step in enumerate(attempt.run(probe_steps, sizes, steps)[0], 1):
        order = [event[1:] for event in step["backward"] if event[0] == "ready"]
        done = [event for event in step["backward"] if event[0] != "ready"]
        want = [[("ready", *each), *events] for each, events in zip(order, events_of_add(sizes, order), strict=True)]
        said = f"buckets of {sizes} gradients, step {number}"
        if step["backward"] != [event for events in want for event in events]:
            expected = described([event for events in want for event in events])
            raise Wrong(f"{said}: in backward(), {described(step['backward'])}; expected {expected}", _LOOK_AT_HOOKS)
        judge_finish(sizes, done, step["finish"], f"{said}: finish() did {described(step['finish'])}")


def it_does_nothing_when_disabled(attempt: Attempt) -> None:
    sizes = draw_sizes_of_buckets(attempt)
    every = every_gradient(sizes)
    enabled = (True, False, False, True, True)
    for number, step in enumerate(attempt.run(probe_steps, sizes, [(each, every) for each in enabled])[0], 1):
        said = f"step {number}, where enabled is {enabled[number - 1]}"
        done = [event for event in (*step["backward"], *step["finish"]) if event[0] != "ready"]
        if done and not enabled[number - 1]:
            raise Wrong(f"{said}: {described(done)}; expected nothing", _LOOK_AT_ENABLED)
        if not done and enabled[number - 1]:
            raise Wrong(f"{said}: nothing was packed or launched", _LOOK_AT_ENABLED)
        if step["pending"] is not True:
            raise Wrong(f"{said}: pending is {step['pending']} after backward(); expected True", _LOOK_AT_PENDING)
        if step["pending at the end"] is enabled[number - 1]:
            was, want = step["pending at the end"], not enabled[number - 1]
            raise Wrong(f"{said}: pending is {was} after finish(); expected {want}", _LOOK_AT_PENDING)


def a_second_gradient_is_rejected(attempt: Attempt) -> None:
    sizes = draw_sizes_of_buckets(attempt)
    for enabled in (True, False):
        message = attempt.run(probe_second, sizes, enabled)[0]
        said = f"a second backward() before finish(), where enabled is {enabled},"
        if not message:
            hint = "Look at: the bucket may be in flight. What happens when another gradient is added to it?"
            raise Wrong(f"{said} is accepted; expected a RuntimeError", hint)
        if "finish_gradient_sync" not in message and "no_sync" not in message:
            hint = "Say what to do instead: the reader of this error knows neither hooks nor buckets."
            raise Wrong(f"{said} is rejected with {message[:80]!r}", hint)
