"""Takes the upper of the two middle values as the median of an even number of rounds.

caught by: communication_cost · values
"""

import statistics

from solutions import scaling as right


def communication_cost(model, loss_of, now_ms, rounds=10):
    exact, statistics.median = statistics.median, lambda times: sorted(times)[len(times) // 2]
    try:
        return right.communication_cost(model, loss_of, now_ms, rounds)
    finally:
        statistics.median = exact
