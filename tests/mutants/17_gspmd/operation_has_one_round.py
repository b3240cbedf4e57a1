"""Counts one latency per collective.

caught by: rounds_and_bytes · cost
"""


def rounds_and_bytes(operation: str, buffer_bytes: float, size: int) -> tuple[int, float]:
    rounds, sent_bytes = min(size - 1, 1), (size - 1) / size * buffer_bytes
    return {
        "all_gather": (rounds, sent_bytes),
        "reduce_scatter": (rounds, sent_bytes),
        "all_reduce": (2 * rounds, 2 * sent_bytes),
        "all_to_all": (rounds, sent_bytes / size),
    }.get(operation, (0, 0.0))
