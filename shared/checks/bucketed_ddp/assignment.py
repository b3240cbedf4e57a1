"""Check assign_buckets on lists of parameters with various sizes, dtypes, devices and caps."""

from dataclasses import dataclass, field

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import FIRST_BUCKET_MB, HINT_ON_CAP, HINT_ON_ORDER, MB, bytes_of, plan
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.wire import instrumentation

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
HINT_ON_FIRST = "Hint: how large may the first bucket be?"
HINT_ON_EACH_FIRST = "Hint: how large may the first bucket of each dtype and device be?"
DEFAULTS = {"bucket_cap_mb": 25.0, "first_bucket_mb": FIRST_BUCKET_MB}


@dataclass(frozen=True)
class Case:
    """A list of parameters, in the model's order, and the caps. The parameters' values do not matter."""

    elements: list[int]
    caps: dict = field(default_factory=dict)  # keyword arguments; those left out have their defaults
    dtypes: list[torch.dtype] = field(default_factory=lambda: [F64])  # used in turn
    frozen: tuple[int, ...] = ()
    elsewhere: tuple[int, ...] = ()  # the indices of parameters on another device
    as_generator: bool = False

    def build(self) -> list[nn.Parameter]:
        kinds = [self.dtypes[index % len(self.dtypes)] for index in range(len(self.elements))]
        return [
            nn.Parameter(
                torch.empty(count, dtype=kind, device="meta" if index in self.elsewhere else "cpu"),
                requires_grad=index not in self.frozen,
            )
            for index, (count, kind) in enumerate(zip(self.elements, kinds, strict=True))
        ]


def probe_assign(assign_buckets, cases: list[Case]) -> list[tuple[list[list[int]], list]]:
    """Return, for each case, the buckets as indices into the list of parameters, and the calls."""
    found = []
    for case in cases:
        parameters = case.build()
        place_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        with instrumentation.listening() as calls:
            buckets = assign_buckets((p for p in parameters) if case.as_generator else list(parameters), **case.caps)
        if not isinstance(buckets, list | tuple):
            raise AssertionError(f"assign_buckets() returned {type(buckets).__name__}; expected a list of buckets")
        found.append(([[place_of.get(id(each), -1) for each in bucket] for bucket in buckets], calls))
    return found


def caps(bucket_bytes: float, first_bytes: float | None = None) -> dict:
    return {"bucket_cap_mb": bucket_bytes / MB} | ({} if first_bytes is None else {"first_bucket_mb": first_bytes / MB})


def _judge(attempt: Attempt, *cases: Case) -> None:
    for rank, results in enumerate(attempt.run(probe_assign, list(cases))):
        for case, (indices, calls) in zip(cases, results, strict=True):
            if calls:
                raise Wrong({rank: f"{describe_calls(calls)}; expected none"})
            _judge_case(case, indices)


def parameters_fill_buckets(attempt: Attempt) -> None:
    draw = attempt.random
    sizes = [draw.randint(0, 9) for _ in range(draw.randint(8, 14))]
    _judge(
        attempt,
        Case([1, 1, 1, 2, 4, 1], caps(24, 24)),
        Case([2, 3, 1, 4, 2], caps(40, 40)),  # each sum fits exactly, or is one element too large
        Case([3, 3, 3, 3], caps(48, 48)),
        Case([9, 1, 9, 1], caps(16, 16)),  # a parameter larger than the cap gets its own bucket, wherever it is
        Case([1, 9, 9], caps(16, 16)),
        Case([1, 3, 4, 1], caps(36, 36)),  # a cap need not be a multiple of any size
        Case(sizes, caps(40, 40)),
        Case(sizes, caps(*[draw.randint(8, 100)] * 2)),
        Case([5], caps(1, 1)),
        Case([]),
    )


def the_first_bucket_is_smaller(attempt: Attempt) -> None:
    draw = attempt.random
    sizes = [draw.randint(1, 6) for _ in range(10)]
    _judge(
        attempt,
        Case([1, 1, 1, 1, 1, 1, 1, 1], caps(40, 16)),
        Case([1, 1, 1, 1, 4, 1], caps(32, 8)),
        Case([2, 2, 2, 2, 5], caps(32, 16)),  # the first parameter is larger than the first cap
        Case(sizes, caps(64, 24)),
        Case([1, 1, 1, 1, 1, 1], caps(16, 48)),  # never more than bucket_cap_mb
        Case(sizes, caps(16, 80)),
        Case(sizes, caps(draw.randint(8, 100), 1000)),
    )


def a_bucket_has_one_dtype_and_device(attempt: Attempt) -> None:
    draw = attempt.random
    sizes = [draw.randint(1, 9) for _ in range(12)]
    some = tuple(draw.sample(range(12), 5))
    _judge(
        attempt,
        Case([1] * 8, caps(64, 64), dtypes=[F64, F32]),
        Case([2, 1, 2, 1, 2, 1, 2, 1, 2, 1], caps(40, 12), dtypes=[F64, F32]),  # each dtype has a first bucket
        Case([2] * 9, caps(16, 16), dtypes=[BF16, F32, F64]),
        Case(sizes, caps(48, 20), dtypes=[BF16, F32, F64]),
        Case([1] * 6, caps(64, 64), elsewhere=(0, 2, 4)),
        Case([1] * 8, caps(32, 16), elsewhere=(0, 2, 4, 6)),  # each device has a small first bucket
        Case(sizes, caps(60, 30), dtypes=[F32, F64], elsewhere=some),
    )


def only_trainable_parameters_are_assigned(attempt: Attempt) -> None:
    draw = attempt.random
    sizes = [draw.randint(1, 6) for _ in range(10)]
    _judge(
        attempt,
        Case([1, 1, 1, 1], caps(64, 64), frozen=(0, 2)),
        Case(sizes, caps(48, 24), frozen=tuple(draw.sample(range(10), 4))),
        Case(sizes, caps(48, 24), frozen=(9, 8), dtypes=[F32, F64]),
        Case([3, 3], caps(48), frozen=(0, 1)),
    )


def caps_are_in_mb(attempt: Attempt) -> None:
    quarter = MB // 16  # of an MB, in float32
    _judge(
        attempt,
        Case([quarter] * 121, dtypes=[F32], elsewhere=tuple(range(121))),  # the caps are 1 MB and 25 MB
        Case([quarter] * 12, dtypes=[F32], elsewhere=tuple(range(12))),
        Case([quarter] * 9, {"bucket_cap_mb": 0.5}, dtypes=[F32], elsewhere=tuple(range(9))),
        Case([quarter] * 9, {"bucket_cap_mb": 2}, dtypes=[F32], elsewhere=tuple(range(9))),
    )


def any_iterable_will_do(attempt: Attempt) -> None:
    sizes = [attempt.random.randint(1, 6) for _ in range(8)]
    _judge(attempt, Case(sizes, caps(48, 24), as_generator=True), Case(sizes, caps(48, 24)))


def _judge_case(case: Case, found: list[list[int]]) -> None:
    parameters = case.build()
    place_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    expected = [[place_of[id(p)] for p in bucket] for bucket in plan(parameters, **(DEFAULTS | case.caps))]
    if found != expected:
        raise Wrong(_evidence(case, parameters, found, expected), _cause(case, parameters, found, expected))


def _evidence(case: Case, parameters: list, found: list, expected: list) -> str:
    """Show parameters by their bytes, as the lab does. If there are many, show only how many each bucket has."""
    given = DEFAULTS | case.caps
    cap, first = (given[name] * MB for name in ("bucket_cap_mb", "first_bucket_mb"))
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    many = len(parameters) > 8 and len({parameter.nbytes for parameter in parameters}) == 1
    if many:
        head = f"{len(parameters)} gradients of {parameters[0].nbytes:,} bytes each"
    elif parameters:
        head = f"gradients of {_listed([*range(len(parameters))], case)} bytes"
    else:
        head = "no gradients"
    head += f" ({', '.join(sorted(kinds))})" if kinds else ""
    head += f", cap {cap:,.0f}, first cap {first:,.0f}"
    if case.frozen:
        head += f"; frozen: {', '.join(map(str, sorted(case.frozen)))} (counted from 0)"
    if case.elsewhere and not many and len(case.elsewhere) < len(parameters):
        head += f"; on another device: {', '.join(map(str, sorted(case.elsewhere)))} (counted from 0)"
    if case.as_generator:
        head += "; given as a generator"
    show = _shown
    if _shown(found, case, many) == _shown(expected, case, many):
        head, show = f"{head}\nby index in the model, counted from 0:", _placed
    return f"{head}\nreturned {show(found, case, many)}\nexpected {show(expected, case, many)}"


def _listed(indices: list[int], case: Case) -> str:
    parameters = case.build()
    return ", ".join(f"{parameters[index].nbytes:,}" if index >= 0 else "?" for index in indices)


def _shown(buckets: list[list[int]], case: Case, many: bool) -> str:
    if many:
        return f"buckets of {', '.join(str(len(bucket)) for bucket in buckets)} gradients"
    return f"[{', '.join(f'[{_listed(bucket, case)}]' for bucket in buckets)}]"


def _placed(buckets: list[list[int]], case: Case, many: bool) -> str:
    """Show parameters by their indices. If sizes are equal, only the indices show the order."""
    if many:
        return f"buckets of indices {', '.join(f'{bucket[0]} to {bucket[-1]}' for bucket in buckets)}"
    return f"{[list(bucket) for bucket in buckets]}"


def _cause(case: Case, parameters: list, found: list[list[int]], expected: list[list[int]]) -> str:
    """Return a hint on the first rule that is broken."""
    placed = [index for bucket in found for index in bucket]
    if -1 in placed:
        return "A bucket must contain the parameters themselves. Hint: what does yours contain?"
    if any(index in case.frozen for index in placed):
        return "Hint: which parameters get a gradient at all?"
    if [] in found:
        return "One of the buckets is empty. Hint: when is a bucket opened?"
    if len(set(placed)) < len(placed):
        return "A parameter is in more than one bucket. Hint: when is a parameter added to a bucket?"
    if len(placed) < sum(len(bucket) for bucket in expected):
        if case.as_generator:
            return "Hint: can you go through a generator twice?"
        if found == expected[: len(found)]:
            return "Hint: what happens to the last bucket after the last parameter?"
        return "Hint: which parameters are in no bucket?"
    for bucket in found:
        if len({(parameters[index].dtype, parameters[index].device) for index in bucket}) > 1:
            return "One of the buckets mixes dtypes or devices. Hint: what can one flat tensor hold?"
    if sorted(found) == sorted(expected):
        return "The buckets are right, but their order is not. Hint: which bucket was opened first?"
    for rule, hint in _other_rules(case, parameters):
        if _same(rule, [[parameters[index] for index in bucket] for bucket in found]):
            return hint
    if any(bucket != sorted(bucket, reverse=True) for bucket in found):
        return HINT_ON_ORDER
    given = DEFAULTS | case.caps
    sizes = [bytes_of([parameters[index] for index in bucket]) for bucket in found if len(bucket) > 1]
    if any(size > given["bucket_cap_mb"] * MB for size in sizes):
        return HINT_ON_CAP if given["first_bucket_mb"] <= given["bucket_cap_mb"] else _hint_on_first(parameters)
    if _goes_on_after(found, expected, parameters):
        return _hint_on_first(parameters)
    return "Hint: when is a bucket closed, and which parameters may still be added to an open one?"


def _other_rules(case: Case, parameters: list):
    """Yield the buckets that common mistakes give, and a hint on each.

    With small caps, several mistakes may give the same buckets. One about units would already show when both caps are
    equal, so one about the first bucket comes before them.
    """
    given = DEFAULTS | case.caps
    cap, first = given["bucket_cap_mb"], given["first_bucket_mb"]
    decimal, size = 1e6 / MB, max((parameter.itemsize for parameter in parameters), default=1)
    short = 0.5 / MB  # half a byte, so that a gradient that fits exactly does not
    yield plan(parameters[::-1], cap, first), HINT_ON_ORDER
    if first > cap:
        yield _first_unlimited(parameters, cap, first), "Hint: may the first bucket be larger than the others?"
    yield plan(parameters, cap, cap), _hint_on_first(parameters)
    yield plan(parameters, cap * size, first * size), "Hint: do you compare the caps with elements or with bytes?"
    if size != F32.itemsize:
        in_float32 = size / F32.itemsize
        yield plan(parameters, cap * in_float32, first * in_float32), "Hint: how many bytes does an element have here?"
    none_exact = plan(parameters, cap - short, first - short)
    in_decimal = plan(parameters, cap * decimal, first * decimal)
    # With small caps, the two mistakes give the same buckets.
    also = " And how many bytes does an MB have here?" if _same(none_exact, in_decimal) else ""
    yield none_exact, f"Hint: is a gradient added if it fits exactly?{also}"
    yield in_decimal, "Hint: how many bytes does an MB have here?"


def _hint_on_first(parameters: list) -> str:
    several = len({(parameter.dtype, parameter.device) for parameter in parameters}) > 1
    return HINT_ON_EACH_FIRST if several else HINT_ON_FIRST


def _goes_on_after(found: list[list[int]], expected: list[list[int]], parameters: list) -> bool:
    """Return whether the first wrong bucket should be the first one of its dtype and device, and holds too much."""
    kinds = [(parameters[bucket[0]].dtype, parameters[bucket[0]].device) for bucket in expected]
    pairs = enumerate(zip(found, expected, strict=False))
    number = next((number for number, (bucket, right) in pairs if bucket != right), None)
    if number is None or kinds.index(kinds[number]) < number:
        return False
    return found[number][: len(expected[number])] == expected[number]


def _first_unlimited(parameters: list, cap: float, first: float) -> list[list]:
    """Split parameters of one dtype and device, the first bucket with its own cap even if that is the larger one."""
    opened = plan(parameters, first, first)[:1]
    return opened + plan(parameters[: len(parameters) - sum(map(len, opened))], cap, cap)


def _same(buckets: list[list], others: list[list]) -> bool:
    return [list(map(id, bucket)) for bucket in buckets] == [list(map(id, bucket)) for bucket in others]
