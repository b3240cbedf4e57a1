"""Returns the duration of the whole step as exposed communication, without subtracting the compute time.

caught by: communication_cost · values
"""

from solutions import scaling as right


def communication_cost(model, loss_of, now_ms, rounds=10):
    compute_ms, exposed_ms = right.communication_cost(model, loss_of, now_ms, rounds)
    return compute_ms, compute_ms + exposed_ms
