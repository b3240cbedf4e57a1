"""Judge the cost model: the inequality, the efficiency, and how many micro-batches a step accumulates.

The functions only calculate, so every check calls them on random cases and compares the results with the formulas.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shared import formulas
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.failures import Wrong

TRIES = 40
TOLERANCE = 1e-6  # relative: the order of additions may differ
RANKS = (2, 3, 4, 8, 64, 512)
_ON_ONE_RANK = "This would be right on 1 rank. Hint: which variable tells your function the number of ranks?"


class Link(NamedTuple):
    """A number of ranks and the link between them, in the order in which the functions take them."""

    ranks: int
    alpha_s: float
    beta_s: float

    def all_reduce_s(self, size_bytes: float) -> float:
        return formulas.ring_all_reduce_s(size_bytes, *self)

    def __str__(self) -> str:
        return f"{self.ranks} ranks, α = {1e6 * self.alpha_s:.4g} µs, β = {1e9 * self.beta_s:.4g} ns per byte"


Timed = list[tuple[float, int]]  # gradients or buckets: (ready_s, size_bytes), in the order in which they are ready


def probe(piece: Callable, calls: list[tuple]) -> list:
    """Call the piece once for each tuple of arguments. Return what it returned, as numbers and tuples of numbers."""
    found = []
    for arguments in calls:
        with _noting(piece, arguments):
            found.append(_plain(piece(*arguments)))
    return found


def probe_with_gradients(piece: Callable, calls: list[tuple]) -> tuple[list, list]:
    """Call the piece like probe(). Also return what it has left in the gradients, the first argument of each call."""
    return probe(piece, calls), [_plain(gradients) for gradients, *_ in calls]


def _results(attempt: Attempt, calls: list[tuple]) -> Iterator[tuple]:
    """Yield rank, arguments and result of each call of a piece, which must not change the gradients it is given."""
    for rank, (results, gradients_left) in enumerate(attempt.run(probe_with_gradients, calls)):
        for call, found, left in zip(calls, results, gradients_left, strict=True):
            if left != _plain(call[0]):
                evidence = f"the call changed the list `gradients` from {_shown(call[0])} to {_shown(list(left))}"
                raise Wrong({rank: evidence}, "Hint: what will the next call with this list get?")
            yield rank, call, found


@contextlib.contextmanager
def _noting(piece: Callable, arguments: tuple):
    """Add a note to an error: with which arguments the piece was called."""
    try:
        yield
    except Exception as error:
        named = ", ".join(f"{name}={_shown(value)}" for name, value in zip(_names(piece), arguments, strict=False))
        error.add_note(f"(Your function was called with {named}.)")
        raise


def _names(piece: Callable) -> list[str]:
    return list(inspect.signature(piece).parameters)


def _shown(value) -> str:
    """Show a number with four digits, and the first elements of a long list or dict."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value[:4]))}{', …' if len(value) > 4 else ''}]"
    return repr(value)


def _plain(value):
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, str | bool | None) else float(value)


def _close(found, expected: float, tolerance: float = TOLERANCE) -> bool:
    is_number = isinstance(found, float) and math.isfinite(found)
    return is_number and math.isclose(found, expected, rel_tol=tolerance)


def _draw_link(attempt: Attempt, ranks: int | None = None) -> Link:
    """Draw a link. Sometimes its latency matters most, sometimes its bandwidth."""
    draw = attempt.random.uniform
    return Link(ranks or attempt.random.choice(RANKS), 10 ** draw(-6, -3.5), 10 ** draw(-10.5, -8))


def _draw_gradients(attempt: Attempt, most: int) -> tuple[float, Timed]:
    """Draw when a step's computation ends, and its gradients. The last one is ready when backward ends."""
    compute_s, count = attempt.random.uniform(0.05, 0.5), attempt.random.randint(1, most)
    ready_s = sorted(attempt.random.uniform(compute_s / 3, compute_s) for _ in range(count - 1))
    sizes_bytes = [4 * attempt.random.randint(100, 1_000_000) for _ in range(count)]
    return compute_s, list(zip([*ready_s, compute_s], sizes_bytes, strict=True))


def _describe(timed: Timed) -> str:
    shown = ", ".join(f"({ready_s:.4f} s, {size:,} bytes)" for ready_s, size in timed[:4])
    return f"[{shown}{', …' if len(timed) > 4 else ''}]"


# -- the inequality


class Model(NamedTuple):
    """What tokens_needed gets besides the link."""

    parameters: float
    flops_per_s: float
    buckets: int
    bytes_each: int

    def tokens(self, link: Link) -> float:
        bucket_bytes = self.bytes_each * self.parameters / self.buckets
        return self.buckets * link.all_reduce_s(bucket_bytes) * self.flops_per_s / (4 * self.parameters)


def _draw_model(attempt: Attempt, buckets: int, bytes_each: int) -> Model:
    draw = attempt.random.uniform
    return Model(round(10 ** draw(6, 11)), 10 ** draw(12, 15), buckets, bytes_each)


def one_bucket_is_hidden(attempt: Attempt) -> None:
    """Try the defaults: one bucket of gradients in bf16."""
    calls = []
    for number in range(TRIES):
        link = _draw_link(attempt, ranks=1 if number == TRIES - 1 else None)
        calls.append((_draw_model(attempt, 1, 2), link))
    _judge_tokens(attempt, calls, lambda model, link: (model.parameters, model.flops_per_s, *link))


def buckets_are_hidden(attempt: Attempt) -> None:
    calls = []
    for _ in range(TRIES):
        model = _draw_model(attempt, attempt.random.randint(2, 400), attempt.random.choice((2, 4)))
        calls.append((model, _draw_link(attempt)))
    _judge_tokens(
        attempt,
        calls,
        lambda model, link: (model.parameters, model.flops_per_s, *link, model.buckets, model.bytes_each),
    )


def _judge_tokens(attempt: Attempt, cases: list[tuple[Model, Link]], arguments_of: Callable) -> None:
    for rank, results in enumerate(attempt.run(probe, [arguments_of(*case) for case in cases])):
        for (model, link), found in zip(cases, results, strict=True):
            expected = model.tokens(link)
            if not (found == 0 if expected == 0 else _close(found, expected)):
                evidence = (
                    f"{link}; {model.parameters:.4g} parameters of {model.bytes_each} bytes in {model.buckets} "
                    f"bucket{'s' * (model.buckets > 1)}, {model.flops_per_s:.4g} operations per second: "
                    f"{found if isinstance(found, str | bool | None) else format(found, '.6g')} tokens; expected "
                    f"{expected:.6g}"
                )
                raise Wrong({rank: evidence}, _cause_of_tokens(model, link, found))


def _cause_of_tokens(model: Model, link: Link, found) -> str:
    expected, free = model.tokens(link), model.tokens(link._replace(alpha_s=0.0))
    if found in (math.ceil(expected), math.floor(expected)):
        return "This is rounded. The exercise asks for T as it is."
    parts = model.parameters * model.bytes_each / model.buckets
    known = [
        (free, "This is right without latency. Hint: how many steps does each all-reduce have?"),
        (
            model.flops_per_s * link.beta_s * model.bytes_each / 2,
            "This is the lesson's C/W. Hint: what does the formula of an all-reduce say about α and about N?",
        ),
        (
            model._replace(buckets=1).tokens(link),
            "This would be right for one bucket. Hint: how often do you pay the latency of a ring?",
        ),
        (
            expected / model.buckets,
            "Hint: this is the time of one of the buckets. How long do all of them take, one after another?",
        ),
        (
            model.buckets * link.all_reduce_s(parts * model.buckets) * model.flops_per_s / (4 * model.parameters),
            "Hint: how many bytes does each bucket have?",
        ),
        (
            model._replace(bytes_each=2).tokens(link),
            "This would be right in bf16. Hint: which variable tells your function how large a gradient is?",
        ),
        (expected * 2 / 3, "Hint: only backward hides the all-reduces. How many operations does backward take?"),
        (0.0, _ON_ONE_RANK),
    ]
    wrong = "Hint: write down the seconds of a backward with T tokens, and the seconds of all all-reduces."
    matches = [(abs(found - value), hint) for value, hint in known if _close(found, value)]
    return min(matches, default=(0.0, wrong))[1]  # where latency hardly counts, several values are close


# -- what the lab gives: the recurrence, and buckets


def step_s(buckets: Timed, compute_s: float, link: Link) -> float:
    ready_s, sizes_bytes = zip(*buckets, strict=True)
    costs_s = [link.all_reduce_s(size) for size in sizes_bytes]
    return compute_s + formulas.exposed_s(list(ready_s), costs_s, compute_s)


def bucketed(gradients: Timed, cap_bytes: int) -> Timed:
    """Close a bucket before a gradient that does not fit. A bucket is ready when its last gradient is."""
    buckets: list[tuple[float, int]] = []
    for ready_s, size in gradients:
        if buckets and buckets[-1][1] + size <= cap_bytes:
            buckets[-1] = (ready_s, buckets[-1][1] + size)
        else:
            buckets.append((ready_s, size))
    return buckets


# -- efficiency


def efficiency(gradients: Timed, compute_s: float, cap_bytes: int, link: Link, kind: str) -> float:
    share = 1 / link.ranks if kind == "strong" else 1.0
    shared_out = [(share * ready_s, size) for ready_s, size in gradients]
    return share * compute_s / step_s(bucketed(shared_out, cap_bytes), share * compute_s, link)


def _judge_efficiency(attempt: Attempt, kind: str) -> None:
    """One rank comes first. Every third step has time left after its last gradient. "weak" may also be the default."""
    calls = []
    for number in range(TRIES):
        compute_s, gradients = _draw_gradients(attempt, 12)
        if number % 3 == 1:
            compute_s *= 1.5
        link = _draw_link(attempt, ranks=1 if number == 0 else None)
        kinds = () if kind == "weak" and number % 2 else (kind,)
        calls.append((gradients, compute_s, 2 ** attempt.random.randint(18, 26), *link, *kinds))
    wrong = []
    for rank, call, found in _results(attempt, calls):
        gradients, compute_s, cap_bytes, *numbers = call[:6]
        link = Link(*numbers)
        expected = efficiency(gradients, compute_s, cap_bytes, link, kind)
        if not _close(found, expected):
            shown = f"{found:.6g}" if isinstance(found, float) else repr(found)
            evidence = (
                f"{kind} scaling, {link}; one rank computes for {compute_s:.4f} s, cap {cap_bytes:,} bytes, "
                f"gradients {_describe(gradients)}: {shown}; expected {expected:.6g}"
            )
            unpacked = efficiency(gradients, compute_s, 0, link, kind)
            hints = _causes_of_efficiency(found, expected, unpacked, link.ranks, kind)
            wrong.append((rank, evidence, hints))
    if wrong:  # Several mistakes may give the same result, so report one that has the fewest possible causes.
        rank, evidence, hints = min(wrong, key=lambda each: len(each[2]))
        raise Wrong({rank: evidence}, hints[0])


def _causes_of_efficiency(found, expected: float, unpacked: float, ranks: int, kind: str) -> list[str]:
    """Return the hints on all known mistakes that give this result, or one hint if there are none."""
    hint_on_buckets = "Hint: how many all-reduces does your step have, and how many would it have with this cap?"
    hint_on_speed_up = "This is the speed-up. Hint: what must you divide it by to get the efficiency?"
    known = [(1.0, _ON_ONE_RANK), (unpacked, hint_on_buckets), (ranks * expected, hint_on_speed_up)]
    if hints := [hint for value, hint in known if _close(found, value)]:
        return hints
    if kind == "strong" and isinstance(found, float) and found > 1:
        return [
            "Hint: an efficiency above 1 would mean that N ranks do more than N times as much as one. What does each "
            "of them compute?"
        ]
    if kind == "strong":
        return [
            "Hint: what does each of N ranks compute, when are its gradients ready, and how many bytes does it send?"
        ]
    return ["Hint: how long does a step take on one rank, and on N ranks that each compute as much?"]


weak_scaling_is_predicted = on_each(_judge_efficiency, "weak")
strong_scaling_is_predicted = on_each(_judge_efficiency, "strong")


# -- accumulation


def as_few_micro_batches_as_possible(attempt: Attempt) -> None:
    """Stay away from ties, in which rounding decides. Measured times may say that nothing is exposed, or less."""
    calls: list[tuple] = [(0.1, 0.0, 0.8), (0.1, -0.004, 0.9)]
    while len(calls) < TRIES:
        compute_s, target = attempt.random.uniform(0.01, 0.5), attempt.random.uniform(0.3, 0.98)
        exposed_s = compute_s * 10 ** attempt.random.uniform(-2, 1)
        if 0.01 < _least(compute_s, exposed_s, target) % 1 < 0.99:
            calls.append((compute_s, exposed_s, target))
    for rank, results in enumerate(attempt.run(probe, calls)):
        for (compute_s, exposed_s, target), found in zip(calls, results, strict=True):
            expected = max(1, math.ceil(_least(compute_s, exposed_s, target)))
            if found != expected:
                shown = f"{found:.6g}" if isinstance(found, float) else repr(found)
                evidence = (
                    f"compute_s={compute_s:.4f}, exposed_s={exposed_s:.4f}, target={target:.4f}: {shown}; "
                    f"expected {expected}"
                )
                raise Wrong({rank: evidence}, _cause_of_micro_batches(compute_s, exposed_s, target, found))


def _least(compute_s: float, exposed_s: float, target: float) -> float:
    """Return the number of micro-batches, not rounded, with which ranks compute for exactly this part of a step."""
    return target * exposed_s / ((1 - target) * compute_s)


def _cause_of_micro_batches(compute_s: float, exposed_s: float, target: float, found) -> str:
    if not isinstance(found, float) or not math.isfinite(found) or found != int(found):
        return "Expected an int."
    if found < 1:
        return "Hint: how many micro-batches does a step have at least?"
    part = found * compute_s / (found * compute_s + exposed_s)
    if part < target:
        return f"With {found:.0f}, they compute for {part:.1%}. Hint: do you round up or down?"
    return f"With {found - 1:.0f}, they would compute for long enough, too. Hint: how often is exposed_s paid per step?"
