"""The ladder compares within a round, judges by the course's aims, and draws what it found. Nothing is timed here."""

import json

import pytest

from benchmarks import ladder
from benchmarks.ladder import Found, Setting
from benchmarks.rungs import ALONE, DDP_VIEW, FLAT

# Each round is slower than the one before for everybody: ratios of medians would hide that ours is always ahead.
ROUNDS_MS = {ALONE: [8, 80, 800], DDP_VIEW: [10, 100, 1000], FLAT: [10, 100, 1000]}
ROUNDS_MS |= {"DDP": [11, 110, 1100], "ManualDDP": [20, 200, 2000], "BucketedDDP": [12, 120, 1200]}
ROUNDS_MS |= {"OverlappedDDP": [9, 90, 900]}


def setting(model: str = "TinyGPT", link: str = "loopback", ranks: int = 2) -> Setting:
    found = {name: Found(times_ms, 3, 41.5, 43.0, 100.0) for name, times_ms in ROUNDS_MS.items()}
    return Setting("averaging", model, link, ranks, found)


def test_ratios_and_exposed_time_compare_within_a_round():
    assert setting().ratios("OverlappedDDP") == pytest.approx([0.9, 0.9, 0.9])
    assert setting().ratios("BucketedDDP", over=FLAT) == pytest.approx([1.2, 1.2, 1.2])
    assert setting().exposed_ms("ManualDDP") == 120


def test_a_round_lasts_until_its_slowest_rank_is_done():
    of_ranks = [{"DDP": Found([1, 5], 3, 2.0, 4.0, 7.0)}, {"DDP": Found([4, 2], 3, 2.5, 4.5, 6.0)}]
    assert ladder.merged(of_ranks) == {"DDP": Found([4, 5], 3, 2.5, 4.5, 7.0)}


def test_aims_are_met_or_missed_by_the_median_ratio():
    met = {row.what.removeprefix("TinyGPT, 2 ranks, loopback: "): row.met for row in ladder.aims([setting()])}
    assert met == {
        "OverlappedDDP / DDP, bucket view": True,
        "BucketedDDP / flat": False,
        "peak, BucketedDDP / DDP": True,
        "peak, OverlappedDDP / DDP, bucket view": True,
    }
    assert not all(row["met"] for row in json.loads(ladder.as_json({}, [setting()]))["aims"])


def test_the_table_has_a_line_per_strategy_and_setting():
    lines = ladder.as_table([setting(), setting(ranks=4)]).splitlines()
    assert len(lines) == 1 + 2 * len(ROUNDS_MS)
    (overlapped,) = [line.split() for line in lines if "OverlappedDDP" in line and " 4 " in line]
    assert overlapped == ["TinyGPT", "loopback", "4", "OverlappedDDP", "90.0", "0.90", "0.90–0.90", *overlapped[7:]]
    assert overlapped[7:] == ["3", "41.50", "43.0", "10.0", "100.0"]


def test_the_figure_has_a_panel_per_setting_and_two_bars_per_strategy():
    settings = [setting(model, ranks=ranks) for model in ("TinyGPT", "many small") for ranks in (2, 4)]
    panels = ladder.figure(settings).axes
    assert [axes.get_title() for axes in panels][:2] == ["TinyGPT\n2 ranks, loopback", "TinyGPT\n4 ranks, loopback"]
    for axes in panels:
        compute, exposed = axes.containers
        assert [bar.get_width() for bar in compute] == [80] * 6
        assert [bar.get_width() for bar in exposed] == pytest.approx([30, 20, 20, 120, 40, 10])
        assert {bar.get_hatch() for bar in exposed} != {bar.get_hatch() for bar in compute}
