"""Judge estimates of what each axis sends, and of what leaves a host, on drawn models and meshes."""

import math
from collections.abc import Callable
from dataclasses import replace

from shared import formulas
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.parallel_3d.cases import AXES
from shared.checks.parallel_3d.coordinates import coordinates_of, describe
from shared.planner.shapes import SHAPES, ModelShape, llama

_EXACT = 1e-9  # relative
_WHOLE = 1e-5  # relative: parameters, tokens or bytes may be rounded to whole numbers
_CASES = 8


def draw_shape(attempt: Attempt, layers_multiple: int) -> ModelShape:
    number = attempt.random.randint
    layers, heads = layers_multiple * number(1, 6), 2 * number(2, 12)
    return llama("drawn", layers, 64 * heads, heads, heads, 64 * number(8, 99), 1000 * number(4, 60), 2 ** number(5, 9))


def draw_case(attempt: Attempt, shuffled: bool) -> tuple[ModelShape, dict[str, int], int]:
    """Draw a model, a mesh with several stages, and a number of sequences."""
    sizes = {axis: attempt.random.choice((2, 2, 3, 4) if axis == "pp" else (1, 2, 2, 3, 4)) for axis in AXES}
    order = attempt.random.sample(AXES, 3) if shuffled else AXES
    sizes = {axis: sizes[axis] for axis in order}
    return draw_shape(attempt, sizes["pp"]), sizes, sizes["dp"] * attempt.random.randint(1, 9)


def bytes_of(shape: ModelShape, sizes: dict[str, int], sequences: int) -> dict[str, float]:
    """Return what one rank sends to each destination, by axis."""
    tokens = sequences * shape.context // sizes["dp"]
    own_parameters = shape.parameters / (sizes["pp"] * sizes["tp"])
    own_layers = shape.layers // sizes["pp"]
    by_axis = {
        "tp": 4 * own_layers * formulas.all_reduce_sent_bytes(2 * tokens * shape.hidden, sizes["tp"]),
        "pp": 2 * tokens * shape.hidden,
        "dp": formulas.all_reduce_sent_bytes(2 * own_parameters, sizes["dp"]),
    }
    return {axis: by_axis[axis] for axis in sizes}


def probe_step_bytes(step_bytes: Callable, cases: list[tuple]) -> list[dict]:
    return [dict(step_bytes(shape, dict(sizes), sequences)) for shape, sizes, sequences in cases]


def judge_step_bytes(attempt: Attempt, cases: list[tuple]) -> None:
    """Compare what a rank sends along each axis.

    Raises:
        Wrong: If it differs.
    """
    for case, found in zip(cases, attempt.run(probe_step_bytes, cases)[0], strict=True):
        shape, sizes, sequences = case
        expected = bytes_of(*case)
        context = f"{describe(sizes)}, {sequences} sequences of {shape.context} tokens"
        if sorted(found) != sorted(expected):
            raise Wrong(f"{context}: the axes are {list(found)}, expected {list(expected)}")
        for axis in AXES:
            if not math.isclose(found[axis], expected[axis], rel_tol=_WHOLE, abs_tol=_EXACT):
                message = (
                    f"{context}: a rank sends {found[axis]:,.0f} bytes along {axis}, expected {expected[axis]:,.0f}"
                )
                raise Wrong(message, _hint_on_bytes(axis, found[axis], expected[axis], sizes))


def _hint_on_bytes(axis: str, found: float, expected: float, sizes: dict[str, int]) -> str:
    if axis == "pp" and math.isclose(found, 2 * expected, rel_tol=_EXACT):
        hint = "Hint: how many directions count, how many bytes does an element have, and which tokens has a replica?"
        return f"It is 2 times too large. {hint}"
    factor = found / expected if expected else 0.0
    if same := [other for other, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=_EXACT)]:
        size, axes = sizes[same[0]], f"{' and '.join(same)} {'have' if len(same) > 1 else 'has'}"
        return f"It is {size} times too large, and {axes} {size} ranks. Hint: what do they divide?"
    if math.isclose(found, 2 * expected, rel_tol=_EXACT):
        return "It is 2 times too large. Hint: how many bytes does an element have?"
    return {
        "tp": "Hint: how many tokens and layers does one rank process in a step?",
        "pp": "Hint: how large is one stage's output, for all tokens of a replica?",
        "dp": "Hint: how many parameters does one rank have, and how many bytes does each gradient have?",
    }[axis]


def small_meshes(attempt: Attempt) -> None:
    shape = draw_shape(attempt, 6)
    plain = [{"dp": 3, "pp": 2, "tp": 1}, {"dp": 1, "pp": 3, "tp": 1}, {"dp": 1, "pp": 2, "tp": 3}]
    judge_step_bytes(attempt, [(shape, sizes, 6) for sizes in plain])


def drawn_meshes(attempt: Attempt) -> None:
    judge_step_bytes(attempt, [draw_case(attempt, shuffled=False) for _ in range(_CASES)])
    judge_step_bytes(attempt, [draw_case(attempt, shuffled=True) for _ in range(_CASES)])


# -- hosts


def leaving_of(
    case: tuple, ranks_per_host: int, host: int, senders: int | None = None, once: bool = False
) -> dict[str, float]:
    """Return what leaves a host, by axis, from the coordinates of all pairs of ranks.

    Args:
        senders: The host whose ranks are asked what they send to other hosts than `host`, if it is another one.
        once: Whether a rank with two destinations on other hosts counts once, which is a mistake.
    """
    senders = host if senders is None else senders
    _, sizes, _ = case
    places, sent, counted = coordinates_of(sizes), bytes_of(*case), set()
    found = dict.fromkeys(sizes, 0.0)
    for rank, place in enumerate(places):
        for other, there in enumerate(places):
            axes = [axis for axis in sizes if place[axis] != there[axis]]
            if len(axes) != 1 or rank // ranks_per_host != senders or other // ranks_per_host == host:
                continue
            (axis,) = axes
            step = there[axis] - place[axis]
            is_destination = abs(step) == 1 if axis == "pp" else step % sizes[axis] == 1
            if is_destination and not (once and (rank, axis) in counted):
                found[axis] += sent[axis]
                counted.add((rank, axis))
    return found


def probe_leaving_bytes(leaving_bytes: Callable, asked: list[tuple]) -> list[dict]:
    return [dict(leaving_bytes(*case, ranks_per_host, host)) for case, ranks_per_host, host in asked]


def judge_leaving_bytes(attempt: Attempt, asked: list[tuple]) -> None:
    """Compare what leaves a host along each axis.

    Raises:
        Wrong: If it differs.
    """
    for (case, ranks_per_host, host), found in zip(asked, attempt.run(probe_leaving_bytes, asked)[0], strict=True):
        _, sizes, sequences = case
        expected = leaving_of(case, ranks_per_host, host)
        context = f"{describe(sizes)}, {sequences} sequences, {ranks_per_host} ranks per host, host {host}"
        for axis in AXES:
            own = found.get(axis)
            if own is None or not math.isclose(own, expected[axis], rel_tol=_WHOLE, abs_tol=_EXACT):
                shown = "nothing" if own is None else f"{own:,.0f} bytes"
                message = f"{context}: {shown} along {axis}, expected {expected[axis]:,.0f} bytes"
                raise Wrong(message, _hint_on_leaving(case, ranks_per_host, host, axis, found))


def _hint_on_leaving(case: tuple, ranks_per_host: int, host: int, axis: str, found: dict[str, float]) -> str:
    if _is_equal(found, leaving_of(case, ranks_per_host, host, once=True)):
        return "Some ranks have two destinations along pp. Hint: how many of the two are on other hosts?"
    of_host_0 = leaving_of(case, ranks_per_host, 0), leaving_of(case, ranks_per_host, host, senders=0)
    if host and any(_is_equal(found, each) for each in of_host_0):
        return f"That is what the ranks of host 0 send. Hint: which ranks are on host {host}?"
    if found.get(axis) and not leaving_of(case, ranks_per_host, host)[axis]:
        return "Nothing leaves the host along this axis. Hint: on which host is each destination?"
    return "Hint: do you count a rank once for each destination on another host, and no other destination?"


def _is_equal(found: dict[str, float], expected: dict[str, float]) -> bool:
    return all(math.isclose(found.get(axis, -1), expected[axis], rel_tol=_EXACT) for axis in AXES)


def plain_hosts(attempt: Attempt) -> None:
    shape = draw_shape(attempt, 2)
    sizes = {"dp": 2, "pp": 2, "tp": 2}
    judge_leaving_bytes(attempt, [((shape, sizes, 4), ranks_per_host, 0) for ranks_per_host in (4, 2, 1)])


def drawn_hosts(attempt: Attempt) -> None:
    asked = []
    for _ in range(2 * _CASES):
        case = draw_case(attempt, shuffled=True)
        count = math.prod(case[1].values())
        ranks_per_host = attempt.random.choice([each for each in range(1, count + 1) if count % each == 0])
        asked.append((case, ranks_per_host, attempt.random.randrange(count // ranks_per_host)))
    middle = draw_shape(attempt, 4), {"dp": 2, "pp": 4, "tp": 1}, 8
    asked.append((middle, 1, 1))  # both neighbors of this host's stage are on other hosts
    large = replace(SHAPES["Llama-2 70B"], context=512)
    asked.append(((large, {"dp": 2, "pp": 2, "tp": 8}, 64), 8, attempt.random.randrange(4)))
    judge_leaving_bytes(attempt, asked)
