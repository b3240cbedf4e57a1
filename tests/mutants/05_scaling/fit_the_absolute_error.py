"""Minimizes the absolute error, so the largest size decides almost alone.

caught by: fit_alpha_beta · noise
"""


def fit_alpha_beta(times_s, ranks):
    steps = 2 * (ranks - 1)
    v = [steps / ranks * size for size in times_s]
    t = list(times_s.values())
    uu, uv, vv = len(t) * steps**2, steps * sum(v), sum(x * x for x in v)
    ut, vt = steps * sum(t), sum(x * y for x, y in zip(v, t, strict=True))
    determinant = uu * vv - uv * uv
    return (ut * vv - vt * uv) / determinant, (vt * uu - ut * uv) / determinant
