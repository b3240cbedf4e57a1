"""Judge GradientReducer, with buckets that only log their calls."""

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import total_of
from shared.checks.engine.failures import Wrong

_HINT_ON_HOOKS = "Hint: which methods may launch a collective, and which may only pack?"
_HINT_ON_LAUNCHES = "Hint: what must happen to a bucket before it is launched?"
_HINT_ON_WAITS = "Hint: which reduce-scatters may still be in flight when finish() returns?"
_HINT_ON_NEXT = "Hint: what must finish() reset for the next backward?"


class LoggedBucket:  # Students see this name in error messages.
    """Stand in for a ShardedBucket, with parameters, previous, pack(), launch() and wait()."""

    def __init__(self, number: int, count: int, log: list[tuple]):
        self.number, self.log, self.previous = number, log, None
        self.parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
        self.packed: set[int] = set()

    def __getattr__(self, name: str):
        raise AttributeError(
            f"a bucket in this check has only parameters, previous, pack(), launch() and wait(); it has no {name}"
        )

    def pack(self, index: int) -> None:
        has_gradient = self.parameters[index].grad is not None
        self.parameters[index].grad = None
        without = "pack again" if index in self.packed else "pack zeros"
        self.log.append(("pack" if has_gradient else without, self.number, index))
        self.packed.add(index)

    def launch(self) -> None:
        previous = None if self.previous is None else self.previous.number
        self.log.append(("launch", self.number, previous))

    def wait(self) -> None:
        self.log.append(("wait", self.number))
        self.packed.clear()


def _use(buckets: list[LoggedBucket], used: dict[int, list[int]]) -> None:
    """Run a backward in which some parameters of some buckets get a gradient."""
    total_of(
        buckets[number].parameters[index].sum() for number, indices in used.items() for index in indices
    ).backward()


def probe_reducer(reducer_class, used: dict[int, list[int]], order: list[int]) -> dict[str, list[tuple]]:
    """Run a backward, reduce some buckets, finish, and run another backward. Return what the buckets did, by moment."""
    log: list[tuple] = []
    buckets = [LoggedBucket(number, count, log) for number, count in enumerate((2, 1, 3))]
    reducer, found = reducer_class(buckets), {}

    def note(moment: str) -> None:
        found[moment] = log[:]
        log.clear()

    _use(buckets, used)
    note("in backward()")
    for number in order:
        reducer.reduce([buckets[number]])
        note(f"in reduce() of bucket {number}")
        reducer.reduce([buckets[number]])
        note(f"in a second reduce() of bucket {number}")
    reducer.finish()
    note("in finish()")
    try:
        _use(buckets, used)
    except RuntimeError as error:
        log.append(("raise", 0, str(error).splitlines()[0]))
    note("in a backward() after finish()")
    reducer.reduce([buckets[order[0]]])
    note("in reduce() after finish()")
    return found


def _judge(attempt: Attempt, used: dict[int, list[int]], order: list[int]) -> None:
    counts = (2, 1, 3)
    found = attempt.run(probe_reducer, used, order)[0]
    packs = {("pack", number, index) for number, indices in used.items() for index in indices}
    zeros = {
        number: {("pack zeros", number, index) for index in range(count) if index not in used.get(number, [])}
        for number, count in enumerate(counts)
    }
    expected_by_moment: dict[str, set] = {"in backward()": packs}
    previous = None
    for number in order:
        expected_by_moment[f"in reduce() of bucket {number}"] = {*zeros[number], ("launch", number, previous)}
        expected_by_moment[f"in a second reduce() of bucket {number}"] = set()
        previous = number
    expected_by_moment["in finish()"] = {("wait", number) for number in range(len(counts))}
    for number in (each for each in range(len(counts)) if each not in order):
        expected_by_moment["in finish()"] |= {*zeros[number], ("launch", number, previous)}
        previous = number
    expected_by_moment["in a backward() after finish()"] = packs
    expected_by_moment["in reduce() after finish()"] = {*zeros[order[0]], ("launch", order[0], None)}
    for moment, expected in expected_by_moment.items():
        _judge_moment(moment, found[moment], expected)


def _judge_moment(moment: str, calls: list[tuple], expected: set[tuple]) -> None:
    context = {("launch", each[1]) if each[0] == "launch" else each for each in expected}
    for each in calls:
        if each[0] == "launch" and ("launch", each[1]) in context and each not in expected:
            hint = (
                "A bucket waits for its `previous` one, so that few buckets are in memory at once. Hint: which "
                "bucket was launched last?"
            )
            raise Wrong(f"{moment}: bucket {each[1]} is launched with the wrong `previous` bucket", hint)
        if each[0] == "raise":
            raise Wrong(f"{moment}: on_gradient() raises {each[2]!r}", _HINT_ON_NEXT)
        # A bucket ignores an index that is packed already and has no new gradient, as long as it is not launched.
        is_harmless = each[0] == "pack again" and ("launch", each[1]) in context
        if not is_harmless and (each not in expected or calls.count(each) > 1):
            raise Wrong(f"{moment}: {_describe(each)} was called, which is not expected here", _HINT_ON_HOOKS)
    if missing := expected - set(calls):
        hint = _HINT_ON_WAITS if min(missing)[0] == "wait" else _HINT_ON_LAUNCHES
        hint = _HINT_ON_NEXT if "after finish()" in moment else hint
        raise Wrong(f"{moment}: {_describe(min(missing))} was not called", hint)
    first_wait = next((index for index, each in enumerate(calls) if each[0] == "wait"), len(calls))
    for number in {each[1] for each in calls}:
        own = [each[0] for each in calls if each[1] == number]
        if "launch" in own and {"pack zeros", "pack again"} & set(own[own.index("launch") :]):
            raise Wrong(f"{moment}: bucket {number} is launched before all its gradients are packed", _HINT_ON_HOOKS)
    if any(each[0] == "launch" for each in calls[first_wait:]):
        raise Wrong(
            f"{moment}: a bucket is waited for before all buckets are launched",
            "Hint: which buckets could be in flight at the same time?",
        )


def _describe(each: tuple) -> str:
    verb, number, *rest = each
    if verb.startswith("pack"):
        why = {"pack": "", "pack zeros": ", whose gradient is missing,", "pack again": ", which is packed already,"}
        return f"pack({rest[0]}) of bucket {number}{why[verb]}"
    return f"{verb}() of bucket {number}"


def packed_in_backward_and_launched_on_demand(attempt: Attempt) -> None:
    """Try a backward in which every parameter gets a gradient."""
    _judge(attempt, {0: [0, 1], 1: [0], 2: [0, 1, 2]}, attempt.random.sample(range(3), 3))


def missing_gradients_count_as_zeros(attempt: Attempt) -> None:
    for used in ({0: [1], 2: [0, 2]}, {1: [0]}):
        _judge(attempt, used, attempt.random.sample(range(3), 2))


def probe_second_backward(reducer_class, used: list[int], reduces: bool) -> tuple[str, str]:
    """Run two backwards without finish(). The first one uses some parameters. Return the error of the second."""
    buckets = [LoggedBucket(0, 2, [])]
    reducer = reducer_class(buckets)
    _use(buckets, {0: used})
    if reduces:
        reducer.reduce(buckets)
    try:
        _use(buckets, {0: [1]})
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def a_second_gradient_is_rejected(attempt: Attempt) -> None:
    for what, used, reduces in (
        ("a second gradient of a parameter, while the first one is only packed,", [0, 1], False),
        ("a second gradient of a parameter, after reduce(),", [0, 1], True),
        ("the first gradient of a parameter, after reduce() has packed zeros for it,", [0], True),
    ):
        kind, message = attempt.run(probe_second_backward, used, reduces)[0]
        if kind != "RuntimeError" or "finish_gradient_sync" not in message:
            does = "is accepted" if kind == "nothing" else f"raises {kind}({message[:80]!r})"
            evidence = f"{what} {does}; expected a RuntimeError that names finish_gradient_sync()"
            hint = "Hint: which gradients of a bucket may still come when it is in flight, and what does `missing` say?"
            raise Wrong(evidence, hint if reduces else "")
