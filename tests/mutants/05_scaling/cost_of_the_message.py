"""Gives back the whole step as what messages cost: no baseline is taken off.

caught by: communication_cost · values
"""

from solutions import scaling as right


def communication_cost(model, loss_of, now_ms, rounds=10):
    compute_ms, exposed_ms = right.communication_cost(model, loss_of, now_ms, rounds)
    return compute_ms, compute_ms + exposed_ms
