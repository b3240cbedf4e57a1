"""Check visible_pairs and merge, which send nothing, against brute force."""

from dataclasses import dataclass

import torch

from shared.checks.context_parallel.sequences import judge, tokens_of
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import total_of
from shared.checks.engine.failures import Wrong

TOKENS = 2  # per chunk
MOST_RANKS = 6


def pairs_of(index: int, source: int, size: int, causal: bool, balanced: bool) -> list[tuple[int, int, bool]]:
    """Find the visible pairs by comparing the positions of all tokens."""
    chunks = 2 if balanced else 1
    length = TOKENS * size * chunks
    queries, keys = (torch.tensor(tokens_of(each, size, balanced, length)) for each in (index, source))
    pairs = []
    for query_chunk, own in enumerate(queries.chunk(chunks)):
        for key_chunk, theirs in enumerate(keys.chunk(chunks)):
            sees = own[:, None] >= theirs[None]
            if not causal:
                pairs.append((query_chunk, key_chunk, False))
            elif sees.any():
                pairs.append((query_chunk, key_chunk, not bool(sees.all())))
    return pairs


def probe_pairs(visible_pairs, calls: list[tuple]) -> list:
    return [visible_pairs(*call) for call in calls]


def the_example_is_right(attempt: Attempt) -> None:
    _judge_pairs(attempt, [(0, 0, 2, True, True), (0, 1, 2, True, True)])


def pairs_equal_brute_force(attempt: Attempt) -> None:
    calls = [
        (index, source, size, causal, balanced)
        for balanced in (True, False)
        for causal in (True, False)
        for size in range(1, MOST_RANKS + 1)
        for index in range(size)
        for source in range(size)
    ]
    _judge_pairs(attempt, calls)


def _judge_pairs(attempt: Attempt, calls: list[tuple]) -> None:
    (results,) = attempt.run(probe_pairs, calls)
    for call, found in zip(calls, results, strict=True):
        index, source, size, causal, balanced = call
        called = f"visible_pairs({index}, {source}, {size}, causal={causal}, balanced={balanced})"
        if not isinstance(found, list):
            raise Wrong(f"{called} returned a {type(found).__name__}; expected a list")
        expected = pairs_of(*call)
        if sorted(found) != expected:
            raise Wrong(
                f"{called} returned {sorted(found)}, expected {expected}", _hint_on_pairs(found, expected, call)
            )


def _hint_on_pairs(found: list, expected: list, call: tuple) -> str:
    _index, _source, _size, causal, balanced = call
    found, all_pairs = [tuple(each) for each in found], {pair[:2] for pair in expected}
    if {pair[:2] for pair in found} == all_pairs and len(found) == len(expected):
        return "The pairs are right. Hint: which of them contain a key that comes later than one of the queries?"
    if not causal:
        return "Hint: what hides a key from a query if there is no mask?"
    if {pair[:2] for pair in found} > all_pairs:
        return "Hint: for which pairs do all keys come later than all queries?"
    order = "2N − 1 − r" if balanced else "r"
    return f"Hint: on rank r, which indices do the chunks have? The last one has the index {order}."


# -- merge


def partial(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query @ key.mT
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)


@dataclass
class Merged:
    output: torch.Tensor
    log_sum: torch.Tensor
    kept: bool  # whether the parts are unchanged


def probe_merge(merge, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Merged:
    """Merge the parts from left to right."""
    parts = [(output.to(device_here()), log_sum.to(device_here())) for output, log_sum in parts]
    before = [[tensor.clone() for tensor in part] for part in parts]
    result = parts[0]
    for part in parts[1:]:
        result = merge(*result, *part)
        if not isinstance(result, tuple) or len(result) != 2:
            raise AssertionError(f"merge returned a {type(result).__name__}; expected a tuple of two tensors")
    kept = all(torch.equal(a, b) for old, new in zip(before, parts, strict=True) for a, b in zip(old, new, strict=True))
    return Merged(result[0].cpu(), result[1].cpu(), kept)


def _judge_merge(attempt: Attempt, keys: list[int], scale: float = 1.0, dtype=torch.float64) -> None:
    draw = torch.Generator().manual_seed(attempt.draw_seed())
    query, key, value = (
        torch.randn(2, 3, length, 4, generator=draw, dtype=torch.float64) for length in (5, sum(keys), sum(keys))
    )
    key *= scale
    parts = [partial(query, *each) for each in zip(key.split(keys, 2), value.split(keys, 2), strict=True)]
    expected_output, expected_log_sum = partial(query, key, value)
    context = f"{len(keys)} parts with {', '.join(map(str, keys))} keys" + (", large scores" if scale > 1 else "")
    given = [tuple(tensor.to(dtype) for tensor in part) for part in parts]
    (found,) = attempt.run(probe_merge, given, context=context)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4

    def hint(rank: int, result: torch.Tensor) -> str:
        if result.shape == expected_output.shape and torch.allclose(
            result, total_of(part[0] for part in parts).to(dtype)
        ):
            return "It is the sum of the outputs. Hint: each output is already divided by the sum of its own keys only."
        mean = (total_of(part[0] for part in parts) / len(parts)).to(dtype)
        if result.shape == expected_output.shape and torch.allclose(result, mean):
            return "It is the mean of the outputs. Hint: do all parts have the same share of the whole sum?"
        if not result.isfinite().all():
            return "Hint: how large is the largest exponent? Which difference is never above 0?"
        return "Hint: which share of the sum of all exponentials does each part have?"

    pairs = {"output": (found.output, expected_output), "log_sum": (found.log_sum, expected_log_sum)}
    for name, (actual, expected) in pairs.items():
        if actual.dtype != dtype:
            raise Wrong(f"{context}: the {name} is in {actual.dtype}; expected {dtype}, which you get")
        judge({0: actual}, {0: expected}, f"{context}: the {name}", hint, tolerance)
    if not found.kept:
        raise Wrong(f"{context}: an argument was overwritten", "Hint: which of your operations work in place?")


two_parts_are_merged = on_each(_judge_merge, [4, 4])


def any_parts_are_merged(attempt: Attempt) -> None:
    _judge_merge(attempt, [attempt.random.randint(1, 9) for _ in range(5)])
    _judge_merge(attempt, [1, 20, 2])
    _judge_merge(attempt, [3, 5], dtype=torch.float32)


def large_scores_do_not_overflow(attempt: Attempt) -> None:
    _judge_merge(attempt, [4, 4, 4], scale=1000.0)
    _judge_merge(attempt, [4, 4], scale=100.0, dtype=torch.float32)
