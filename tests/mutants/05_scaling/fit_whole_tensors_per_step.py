"""Assumes that each step of the ring sends the whole tensor.

caught by: fit_alpha_beta · values
"""

from solutions import scaling as right


def fit_alpha_beta(times_s, ranks):
    alpha_s, beta_s = right.fit_alpha_beta(times_s, ranks)
    return alpha_s, beta_s / ranks
