"""Averages the lines through all pairs of neighboring sizes.

caught by: fit_alpha_beta · noise
"""

from itertools import pairwise


def fit_alpha_beta(times_s, ranks):
    steps, fits = 2 * (ranks - 1), []
    for (size, time_s), (larger, longer_s) in pairwise(times_s.items()):
        slope = (longer_s - time_s) / (larger - size)
        fits.append(((time_s - slope * size) / steps, slope * ranks / steps))
    return tuple(sum(values) / len(fits) for values in zip(*fits, strict=True))
