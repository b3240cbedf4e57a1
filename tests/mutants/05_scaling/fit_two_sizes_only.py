"""Draws the line through the smallest and the largest size, and ignores what lies between.

caught by: fit_alpha_beta · noise
"""


def fit_alpha_beta(times_s, ranks):
    small, large = min(times_s), max(times_s)
    slope = (times_s[large] - times_s[small]) / (large - small)
    steps = 2 * (ranks - 1)
    return (times_s[small] - slope * small) / steps, slope * ranks / steps
