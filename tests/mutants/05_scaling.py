"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import statistics

from solutions import scaling


def efficiency_strong_by_default():
    """Takes strong scaling for the default.

    caught by: efficiency · weak
    """

    def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="strong"):
        return scaling.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind)


def efficiency_strong_in_whole_steps():
    """Divides the step of weak scaling by the number of ranks.

    caught by: efficiency · strong
    """

    def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
        weak = scaling.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s)
        return weak if kind == "weak" else weak / ranks


def efficiency_strong_sends_less():
    """Assumes that in strong scaling a rank sends only 1/N of the bytes.

    caught by: efficiency · strong
    """

    def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
        if kind == "strong":
            compute_s /= ranks
            gradients = [(ready_s / ranks, size / ranks) for ready_s, size in gradients]
        return scaling.efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s)


def cost_as_upper_median():
    """Takes the upper of the two middle values as the median of an even number of rounds.

    caught by: communication_cost · values
    """

    def communication_cost(model, loss_of, now_ms, rounds=10):
        exact, statistics.median = statistics.median, lambda times: sorted(times)[len(times) // 2]
        try:
            return scaling.communication_cost(model, loss_of, now_ms, rounds)
        finally:
            statistics.median = exact


def cost_of_the_message():
    """Returns the duration of the whole step as exposed communication, without subtracting the compute time.

    caught by: communication_cost · values
    """

    def communication_cost(model, loss_of, now_ms, rounds=10):
        compute_ms, exposed_ms = scaling.communication_cost(model, loss_of, now_ms, rounds)
        return compute_ms, compute_ms + exposed_ms
