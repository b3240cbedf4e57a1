"""Judge the cost model: its fit, its prediction of a step, its buckets and best cap, and its efficiency.

The functions only calculate, so every check calls them on random cases and compares the results with the formulas.
"""

import contextlib
import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from shared import formulas
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong

TRIES = 40
TOLERANCE = 1e-6  # relative: the order of additions may differ
FIT_TOLERANCE = 1e-9  # in float64, the error of a fit is below 1e-11; in float32, it is above 1e-6
RANKS = (2, 3, 4, 8, 64, 512)
SIZES_BYTES = (400, 4_000, 40_000, 400_000, 4_000_000, 40_000_000)
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
    """Add notes to an error: with which arguments the piece was called, and which earlier function raised it."""
    try:
        yield
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].name
        if innermost in ("buckets_of", "predict_step_s") and innermost != getattr(piece, "__name__", ""):
            error.add_note(f"(The error comes from your {innermost}. Does it pass its own check?)")
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


# -- fit


def least_squares(times_s: dict[int, float], ranks: int, weighted: bool = True) -> tuple[float, float]:
    """Fit α and β by least squares of the relative error, or of the absolute one if not weighted."""
    measured_s = torch.tensor(list(times_s.values()), dtype=torch.float64)
    sizes = torch.tensor(list(times_s), dtype=torch.float64)
    largest = sizes.max()  # columns of similar magnitude keep the solution exact
    columns = 2 * (ranks - 1) * torch.stack([torch.ones_like(sizes), sizes / largest / ranks], dim=1)
    weights = 1 / measured_s if weighted else torch.ones_like(measured_s)
    solution = torch.linalg.lstsq(columns * weights[:, None], (measured_s * weights)[:, None]).solution[:, 0]
    return solution[0].item(), (solution[1] / largest).item()


def _judge_fit(attempt: Attempt, noise: float) -> None:
    calls = []
    for count in [2, 2, *(attempt.random.randint(3, len(SIZES_BYTES)) for _ in range(TRIES))]:
        link = _draw_link(attempt)
        sizes = sorted(attempt.random.sample(SIZES_BYTES, count))
        calls.append((_draw_times(attempt, link, sizes, noise), link.ranks))
    for rank, results in enumerate(attempt.run(probe, calls)):
        for (times_s, ranks), found in zip(calls, results, strict=True):
            expected = least_squares(times_s, ranks)
            if not _same_fit(found, expected, FIT_TOLERANCE):
                shown = ", ".join(f"{size:,} bytes: {time_s:.4g} s" for size, time_s in times_s.items())
                digits = 10 if _pair(found) == _pair(expected) else 4
                evidence = f"{ranks} ranks, {shown}: {_pair(found, digits)}; expected {_pair(expected, digits)}"
                raise Wrong({rank: evidence}, _cause_of_fit(times_s, ranks, found, expected))


def _draw_times(attempt: Attempt, link: Link, sizes: list[int], noise: float) -> dict[int, float]:
    """Draw noisy times to which a positive α and β fit best, because negative ones would look like a mistake."""
    while True:
        times_s = {size: link.all_reduce_s(size) * attempt.random.uniform(1 - noise, 1 + noise) for size in sizes}
        if min(least_squares(times_s, link.ranks)) > 0:
            return times_s


def _same_fit(found, expected: tuple[float, float], tolerance: float = TOLERANCE) -> bool:
    is_pair = isinstance(found, tuple) and len(found) == 2
    return is_pair and all(_close(one, other, tolerance) for one, other in zip(found, expected, strict=True))


def _pair(found, digits: int = 4) -> str:
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(value, float) for value in found):
        return f"α = {found[0]:.{digits}g} s, β = {found[1]:.{digits}g} s per byte"
    return f"returned {found!r}"


def _cause_of_fit(times_s: dict[int, float], ranks: int, found, expected: tuple[float, float]) -> str:
    alpha_s, beta_s = expected
    steps, sizes = 2 * (ranks - 1), list(times_s)
    first, last = sizes[0], sizes[-1]
    slope = (times_s[last] - times_s[first]) / (last - first)
    known = {
        least_squares(times_s, ranks, weighted=False): (
            "This minimizes the absolute error. Hint: which measurement contributes most to that error?"
        ),
        (alpha_s * steps, beta_s * steps / ranks): (
            "This fits one message of the whole tensor. Hint: how many steps does a ring all-reduce have, and how much "
            "does each of them send?"
        ),
        (2 * alpha_s, 2 * beta_s): "Both are doubled. Hint: how many steps does a ring all-reduce have?",
        (alpha_s, beta_s / ranks): "Hint: how many bytes does one step of the ring send?",
        (beta_s, alpha_s): "These are β and α. Hint: in which order does your function return them?",
        (alpha_s, 1 / beta_s): "This is the bandwidth 1/β; expected β.",
        ((times_s[first] - slope * first) / steps, slope * ranks / steps): (
            "This uses only the smallest and the largest size. Hint: what do the other measurements say?"
        ),
    }
    hint_on_dtype = "The first digits are right. Hint: in which dtype do you add up numbers as different as u² and v²?"
    if _same_fit(found, expected, tolerance=1e-4):
        return hint_on_dtype
    for values, hint in known.items():
        if _same_fit(found, values):
            return hint
    if _same_fit(found, expected, tolerance=1e-2):  # In float32, the error is rarely that large.
        return hint_on_dtype
    u = steps / times_s[first]
    return (
        f"Hint: for {first:,} bytes, u is {u:.4g} and v is {u * first / ranks:.4g}. Does your function calculate the "
        "same? If so, do its α and β solve both equations?"
    )


def the_line_is_found(attempt: Attempt) -> None:
    _judge_fit(attempt, noise=0.0)


def noisy_times_are_fitted(attempt: Attempt) -> None:
    _judge_fit(attempt, noise=0.2)


# -- prediction of a step


def step_s(buckets: Timed, compute_s: float, link: Link) -> float:
    ready_s, sizes_bytes = zip(*buckets, strict=True)
    costs_s = [link.all_reduce_s(size) for size in sizes_bytes]
    return compute_s + formulas.exposed_s(list(ready_s), costs_s, compute_s)


def steps_are_predicted(attempt: Attempt) -> None:
    """Try one bucket, one rank, buckets that are all hidden, buckets that are all late, and buckets out of order.

    A bucket may be ready before the one that is launched before it, because the launch order is fixed.
    """
    calls = []
    for number in range(TRIES):
        compute_s, buckets = _draw_gradients(attempt, 1 if number < 3 else 8)
        link = _draw_link(attempt, ranks=1 if number == 3 else None)
        if number % 4 == 1:  # a step that ends at least 0.1 s after its last gradient, and a link that needs less
            compute_s, link = 3 * compute_s, link._replace(alpha_s=1e-6, beta_s=1e-9)
        if number % 4 == 2:
            buckets = [(compute_s, size) for _, size in buckets]
        if number % 4 == 3:
            attempt.random.shuffle(buckets)
        calls.append((buckets, compute_s, *link))
    for rank, results in enumerate(attempt.run(probe, calls)):
        for (buckets, compute_s, *numbers), found in zip(calls, results, strict=True):
            link = Link(*numbers)
            if not _close(found, expected := step_s(buckets, compute_s, link)):
                evidence = (
                    f"{link}; computes for {compute_s:.4f} s, buckets {_describe(buckets)}: the step takes "
                    f"{_seconds(found)}; expected {expected:.6g} s"
                )
                raise Wrong({rank: evidence}, _cause_of_step(buckets, compute_s, link, found))


def _seconds(found) -> str:
    return f"{found:.6g} s" if isinstance(found, float) else repr(found)


def _cause_of_step(buckets: Timed, compute_s: float, link: Link, found) -> str:
    costs_s, end_s = [link.all_reduce_s(size) for _, size in buckets], 0.0
    for (ready_s, _), cost_s in zip(buckets, costs_s, strict=True):
        end_s = max(end_s, ready_s) + cost_s
    known = [
        (
            end_s - compute_s,
            "This is the time from the end of backward to the end of the last all-reduce. Hint: what else does the "
            "step consist of?",
        ),
        (max(0.0, end_s - compute_s), "This is the exposed time alone. Hint: what else does the step consist of?"),
        (compute_s + end_s, "Hint: from which moment do ready_s and e₁ count?"),
        (compute_s + sum(costs_s), "Hint: which buckets are in flight while backward still computes?"),
        (end_s, "Hint: can a step end before its backward does?"),
        (step_s(sorted(buckets), compute_s, link), "Hint: in which order are the buckets launched?"),
        (
            max(compute_s, *(ready + cost for (ready, _), cost in zip(buckets, costs_s, strict=True))),
            "Hint: when can a bucket start if the one before it is still in flight?",
        ),
        (
            compute_s + max(0.0, _end_of_messages_s(buckets, link) - compute_s),
            "This is the time of one message per bucket. Hint: how long does a ring all-reduce take?",
        ),
        (compute_s, _ON_ONE_RANK),
    ]
    by_hand = "e₁ and e₂" if len(buckets) > 1 else "e₁"
    return next((hint for value, hint in known if _close(found, value)), f"Hint: compute {by_hand} on paper.")


def _end_of_messages_s(buckets: Timed, link: Link) -> float:
    end_s = 0.0
    for ready_s, size in buckets:
        end_s = max(end_s, ready_s) + link.alpha_s + link.beta_s * size
    return end_s


# -- buckets and the best cap


def bucketed(gradients: Timed, cap_bytes: int) -> Timed:
    """Close a bucket before a gradient that does not fit. A bucket is ready when its last gradient is."""
    buckets: list[tuple[float, int]] = []
    for ready_s, size in gradients:
        if buckets and buckets[-1][1] + size <= cap_bytes:
            buckets[-1] = (ready_s, buckets[-1][1] + size)
        else:
            buckets.append((ready_s, size))
    return buckets


def buckets_are_filled_in_order(attempt: Attempt) -> None:
    """Some buckets are filled exactly to the cap, and some gradients are larger than it."""
    calls = []
    for number in range(TRIES):
        _, gradients = _draw_gradients(attempt, 1 + number // 2)
        size = attempt.random.choice([size for _, size in gradients])
        exactly = sum(size for _, size in gradients[: attempt.random.randint(1, len(gradients))])
        calls.append((gradients, attempt.random.choice([size, exactly, exactly - 4, 2 * size])))
    for rank, (gradients, cap_bytes), found in _results(attempt, calls):
        if not _same_buckets(found, expected := bucketed(gradients, cap_bytes)):
            evidence = (
                f"cap {cap_bytes:,} bytes, gradients {_describe(gradients)}: {_buckets(found)}; expected "
                f"{_buckets(expected)}"
            )
            raise Wrong({rank: evidence}, _cause_of_buckets(found, gradients, expected))


def _same_buckets(found, expected: Timed) -> bool:
    if not isinstance(found, tuple) or len(found) != len(expected):
        return False
    return all(
        isinstance(bucket, tuple) and len(bucket) == 2 and all(map(_close, bucket, known))
        for bucket, known in zip(found, expected, strict=True)
    )


def _buckets(found) -> str:
    if isinstance(found, list | tuple) and all(isinstance(b, tuple) and len(b) == 2 for b in found):
        return f"{len(found)} buckets, {_describe([(ready_s, int(size)) for ready_s, size in found])}"
    return f"returned {found!r}"


def _cause_of_buckets(found, gradients: Timed, expected: Timed) -> str:
    if not isinstance(found, tuple) or not all(isinstance(b, tuple) and len(b) == 2 for b in found):
        return "Expected a list of buckets, each as (ready_s, size_bytes)."
    if any(size == 0 for _, size in found):
        return "Hint: when can your function close a bucket to which it has not added a gradient?"
    if sum(size for _, size in found) != sum(size for _, size in gradients):
        return "Hint: is every gradient in a bucket, even the last one?"
    if [size for _, size in found] == [float(size) for _, size in expected]:
        return "Hint: when a bucket is launched, which of its gradients became ready last?"
    return "Hint: at which gradient is a bucket closed, and which bucket does that gradient belong to?"


def _draw_caps(attempt: Attempt) -> tuple:
    """Draw gradients, increasing caps, the computing time and a link."""
    compute_s, gradients = _draw_gradients(attempt, 24)
    caps = sorted(attempt.random.sample([2**k for k in range(18, 28)], attempt.random.randint(3, 6)))
    return gradients, caps, compute_s, *_draw_link(attempt)


def _draw_two_valleys(attempt: Attempt, downwards: bool) -> tuple:
    """Draw a case in which the step becomes longer and then shorter than ever, as the caps increase or decrease."""
    while True:
        gradients, caps, compute_s, *link = _draw_caps(attempt)
        caps.sort(reverse=downwards)
        times_s = _steps_s(gradients, caps, compute_s, Link(*link))
        if _first_valley_s(times_s, caps) > 1.001 * min(times_s.values()):
            return gradients, caps, compute_s, *link


def _steps_s(gradients: Timed, caps: list[int], compute_s: float, link: Link) -> dict[int, float]:
    return {cap: step_s(bucketed(gradients, cap), compute_s, link) for cap in caps}


def _first_valley_s(times_s: dict[int, float], caps: list[int]) -> float:
    """Return the shortest time that a loop finds if it stops before the first cap with a longer step."""
    for cap, following in itertools.pairwise(caps):
        if times_s[following] > times_s[cap]:
            return times_s[cap]
    return times_s[caps[-1]]


def the_best_cap_is_found(attempt: Attempt) -> None:
    """The caps come in any order. In the last two, a loop that stops when the step becomes longer stops too early."""
    calls = [_draw_caps(attempt) for _ in range(TRIES)]
    for _, caps, *_ in calls[1::2]:
        attempt.random.shuffle(caps)
    calls += [_draw_two_valleys(attempt, downwards) for downwards in (False, True)]
    for rank, (gradients, caps, compute_s, *numbers), found in _results(attempt, calls):
        link = Link(*numbers)
        times_s = _steps_s(gradients, caps, compute_s, link)
        best = min(caps, key=times_s.__getitem__)
        context = f"{link}; {len(gradients)} gradients, caps {caps}"
        if found not in times_s:
            shown = f"{found:.6g}" if isinstance(found, float) else repr(found)
            hint = "Hint: does your function return a cap, or something else, such as its index or a time?"
            raise Wrong({rank: f"{context}: returned {shown}; expected one of the caps"}, hint)
        if times_s[found] > times_s[best] * (1 + TOLERANCE):
            evidence = (
                f"{context}: returned {found:,.0f}, with which a step takes {times_s[found]:.6g} s; with {best:,} "
                f"it takes {times_s[best]:.6g} s"
            )
            raise Wrong({rank: evidence}, _cause_of_cap(found, caps, times_s, link.ranks))


def _cause_of_cap(found, caps: list[int], times_s: dict[int, float], ranks: int) -> str:
    valleys_s = [_first_valley_s(times_s, order) for order in (caps, sorted(caps), sorted(caps, reverse=True))]
    if times_s[found] in valleys_s:
        return "Hint: if a step takes longer with the next cap, can a later cap still be better?"
    if found == max(caps):
        return "Hint: with the largest cap, when can the first bucket be launched?"
    if found == min(caps):
        return (
            "Hint: with the smallest cap, how many buckets are there, and how much latency does each of them add on "
            f"{ranks} ranks?"
        )
    return "Hint: which cap gives the shortest step, for this number of ranks and this link?"


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


def weak_scaling_is_predicted(attempt: Attempt) -> None:
    _judge_efficiency(attempt, "weak")


def strong_scaling_is_predicted(attempt: Attempt) -> None:
    _judge_efficiency(attempt, "strong")
