"""Counts the steps of a reduce-scatter, so α and β become twice as large.

caught by: fit_alpha_beta · values
"""

from solutions import scaling as right


def fit_alpha_beta(times_s, ranks):
    alpha_s, beta_s = right.fit_alpha_beta(times_s, ranks)
    return 2 * alpha_s, 2 * beta_s
