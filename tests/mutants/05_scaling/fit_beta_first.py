"""Returns β and α instead of α and β.

caught by: fit_alpha_beta · values
"""

from solutions import scaling as right


def fit_alpha_beta(times_s, ranks):
    return right.fit_alpha_beta(times_s, ranks)[::-1]
