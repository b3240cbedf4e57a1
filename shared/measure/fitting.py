"""Fit α and β to measured times: least squares of the relative error, with intervals and residuals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shared import formulas
from shared.measure.rounds import Times
from shared.tables import ShowsTable, Table

RESAMPLES = 1000
INTERVAL = (0.05, 0.95)  # the range that contains nine out of ten fits to drawn rounds
HOLDS_WITHIN = 1.25


@dataclass(frozen=True, repr=False)
class Fit(ShowsTable):
    """The latency α of a message and the time β of a byte: sending S bytes takes α + βS seconds.

    The intervals contain α and β in nine of ten repetitions of this measurement (bootstrap: rounds are drawn with
    replacement and fitted again). They do not say whether the formula is right. The residuals do: they are the measured
    times divided by the formula's. If one is off by more than a quarter, or if α or β is not positive, the formula does
    not hold over these sizes, and must not be used to predict.
    """

    alpha_s: float
    beta_s_per_byte: float
    alpha_interval_s: tuple[float, float]
    beta_interval_s_per_byte: tuple[float, float]
    measured_over_formula: dict[int, float]  # by size in bytes
    where: str = ""

    @property
    def gbit_per_s(self) -> float:
        """The bandwidth, 1/β."""
        return 8e-9 / self.beta_s_per_byte

    @property
    def worst(self) -> tuple[int, float]:
        """The size at which the formula is furthest off, and by what factor."""
        return max(self.measured_over_formula.items(), key=lambda item: _factor(item[1]))

    @property
    def holds(self) -> bool:
        return min(self.alpha_s, self.beta_s_per_byte) > 0 and _factor(self.worst[1]) <= HOLDS_WITHIN

    @property
    def verdict(self) -> str:
        """Say in one sentence whether the formula holds."""
        if min(self.alpha_s, self.beta_s_per_byte) <= 0:
            return "The formula does not hold here: α and β must both be above 0."
        size, ratio = self.worst
        if not self.holds:
            return f"The formula does not hold here: at {size:,} bytes, the time is {ratio:.2f} times the formula's."
        lowest, highest = min(self.measured_over_formula.values()), max(self.measured_over_formula.values())
        if lowest > 0.99 and highest < 1.01:
            return "The formula holds: every measured time is within 1% of the formula's."
        return f"The formula holds: every measured time is {lowest:.2f} to {highest:.2f} times the formula's."

    def message_s(self, size_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * size_bytes

    def ring_all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        return formulas.ring_all_reduce_s(size_bytes, ranks, self.alpha_s, self.beta_s_per_byte)

    def table(self) -> Table:
        alpha = [_rounded(1e6 * seconds) for seconds in (self.alpha_s, *self.alpha_interval_s)]
        beta = [_rounded(1e9 * seconds) for seconds in (self.beta_s_per_byte, *self.beta_interval_s_per_byte)]
        rows = [["α", alpha[0], f"{alpha[1]} to {alpha[2]}", "µs per message"]]
        rows += [["β", beta[0], f"{beta[1]} to {beta[2]}", "ns per byte"]]
        note = "\n".join(filter(None, [self.where, self.verdict]))
        return Table(["", "fitted", "in nine of ten fits", ""], rows, note)


def fit(times: Mapping[int, Times], *, steps: int = 1, pieces: int = 1, where: str = "") -> Fit:
    """Fit α and β to the times of a job that sends `steps` messages in a row, each of 1/pieces of the tensor.

    Minimizes the sum of ((α + βS)/measured − 1)², so all sizes count equally. Noise of 10% makes the result about 2%
    too small, because dividing by the measured time favors short ones.

    Args:
        times: By the size of the tensor in bytes.

    Raises:
        ValueError: If there are fewer than two sizes, because a line needs two points.
    """
    if len(times) < 2:
        raise ValueError(f"fitting α and β needs at least two sizes, got {len(times)}")
    message_bytes = torch.tensor([size / pieces for size in times], dtype=torch.float64)
    rounds_s = torch.tensor([each.rounds_s for each in times.values()], dtype=torch.float64).T / steps
    alpha_s, beta_s = _least_squares(message_bytes, _median(rounds_s)[None])[0].tolist()
    draws = torch.randint(len(rounds_s), (RESAMPLES, len(rounds_s)), generator=torch.Generator().manual_seed(0))
    # A round is drawn with all its sizes, because what disturbs a round may disturb several of them.
    resampled = _least_squares(message_bytes, _median(rounds_s[draws]))
    intervals = resampled.quantile(torch.tensor(INTERVAL, dtype=torch.float64), dim=0).T.tolist()
    measured_s = _median(rounds_s).tolist()
    formula_s = (alpha_s + beta_s * message_bytes).tolist()
    ratios = [measured / predicted for measured, predicted in zip(measured_s, formula_s, strict=True)]
    residuals = dict(zip(times, ratios, strict=True))
    return Fit(alpha_s, beta_s, tuple(intervals[0]), tuple(intervals[1]), residuals, where)


def _median(rounds_s: torch.Tensor) -> torch.Tensor:
    """[..., rounds, sizes] → [..., sizes], with the mean of the two in the middle if their number is even."""
    return rounds_s.quantile(0.5, dim=-2)


def _least_squares(message_bytes: torch.Tensor, measured_s: torch.Tensor) -> torch.Tensor:
    """Solve for (α, β) in each row: [fits, sizes] → [fits, 2]."""
    scale = message_bytes.max()  # columns of similar magnitude keep the solution exact
    columns = torch.stack([torch.ones_like(message_bytes), message_bytes / scale], dim=1) / measured_s[..., None]
    solution = torch.linalg.lstsq(columns, torch.ones_like(columns[..., :1])).solution[..., 0]
    return solution / torch.stack([torch.ones_like(scale), scale])


def _rounded(value: float) -> str:
    """Write three digits, or all digits before the decimal point if there are more than three."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _factor(ratio: float) -> float:
    """Return by what factor a ratio differs from 1, in either direction."""
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf
