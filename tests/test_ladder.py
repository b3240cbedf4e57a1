"""The ladder compares within a round, checks its targets and draws its measurements. Nothing is timed here."""

import json

import pytest

from benchmarks import ladder, report
from benchmarks.ladder import Measurement, Setting
from benchmarks.rungs import ALONE, DDP_VIEW, FLAT, RUNGS

# Each round is slower than the one before for everybody: ratios of medians would hide that ours is always ahead.
ROUNDS_MS = {ALONE: [8, 80, 800], DDP_VIEW: [10, 100, 1000], FLAT: [10, 100, 1000]}
ROUNDS_MS |= {"DDP": [11, 110, 1100], "ManualDDP": [20, 200, 2000], "BucketedDDP": [12, 120, 1200]}
ROUNDS_MS |= {"OverlappedDDP": [9, 90, 900]}


def setting(model: str = "TinyGPT", link: str = "loopback", ranks: int = 2) -> Setting:
    measured = {name: Measurement(times_ms, 3, 41.5, 43.0, 100.0) for name, times_ms in ROUNDS_MS.items()}
    return Setting("averaging", model, link, ranks, measured)


def test_ratios_and_exposed_time_compare_within_a_round():
    assert setting().ratios("OverlappedDDP") == pytest.approx([0.9, 0.9, 0.9])
    assert setting().ratios("BucketedDDP", over=FLAT) == pytest.approx([1.2, 1.2, 1.2])
    assert setting().exposed_ms("ManualDDP") == 120


def test_a_round_lasts_until_its_slowest_rank_is_done():
    per_rank = [{"DDP": Measurement([1, 5], 3, 2.0, 4.0, 7.0)}, {"DDP": Measurement([4, 2], 3, 2.5, 4.5, 6.0)}]
    assert ladder.merged(per_rank) == {"DDP": Measurement([4, 5], 3, 2.5, 4.5, 7.0)}


def test_aims_are_met_or_missed_by_the_median_ratio():
    met = {row.what.removeprefix("TinyGPT, 2 ranks, loopback: "): row.met for row in ladder.targets([setting()])}
    assert met == {
        "OverlappedDDP / DDP, bucket view": True,
        "BucketedDDP / flat": False,
        "peak, BucketedDDP / DDP": True,
        "peak, OverlappedDDP / DDP, bucket view": True,
    }
    assert not all(row["met"] for row in json.loads(ladder.as_json({}, [setting()]))["targets"])


def test_the_table_has_a_line_per_strategy_and_setting():
    lines = ladder.as_table([setting(), setting(ranks=4)]).splitlines()
    assert len(lines) == 1 + 2 * len(ROUNDS_MS)
    (overlapped,) = [line.split() for line in lines if "OverlappedDDP" in line and " 4 " in line]
    assert overlapped == ["TinyGPT", "loopback", "4", "OverlappedDDP", "90.0", "0.90", "0.90–0.90", *overlapped[7:]]
    assert overlapped[7:] == ["3", "41.50", "43.0", "10.0", "100.0"]


def test_the_markdown_has_the_aims_missed_ones_bold_and_a_row_per_strategy():
    lines = ladder.as_markdown({"cores": 2}, [setting(), setting(ranks=4, link="1gbit")], rounds=3).splitlines()
    assert lines[0] == "One run of 3 rounds: cores 2."
    assert lines[2] == "| target for the time ratio | TinyGPT, 2 | TinyGPT, 4, 1gbit |"
    assert lines[4:6] == [
        "| OverlappedDDP / DDP, bucket view ≤ 1 | 0.90 | 0.90 |",
        "| BucketedDDP / flat ≤ 1.1 | **1.20** | **1.20** |",
    ]
    assert len(lines) == 6 + 3 + 2 * len(ROUNDS_MS) and len({line.count("|") for line in lines[7:]}) == 1


def test_tables_go_between_their_marks_and_nowhere_else(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- one -->\nold\n<!-- /one -->\nbelow\n")
    for text in ("new", "newer"):
        report.put_between(page, "one", text)
    assert page.read_text() == "above\n<!-- one -->\n\nnewer\n\n<!-- /one -->\nbelow\n"
    with pytest.raises(ValueError, match="must contain the markers <!-- other -->"):
        report.put_between(page, "other", "new")


def test_the_readme_has_a_place_for_each_kind_of_rungs():
    page = ladder.README.read_text()
    assert all(f"<!-- ladder {kind} -->" in page and f"<!-- /ladder {kind} -->" in page for kind in RUNGS)


def test_the_figure_has_a_panel_per_setting_and_two_bars_per_strategy():
    settings = [setting(model, ranks=ranks) for model in ("TinyGPT", "many small") for ranks in (2, 4)]
    panels = ladder.figure(settings).axes
    assert [axes.get_title() for axes in panels][:2] == ["TinyGPT\n2 ranks, loopback", "TinyGPT\n4 ranks, loopback"]
    for axes in panels:
        compute, exposed = axes.containers
        assert [bar.get_width() for bar in compute] == [80] * 6
        assert [bar.get_width() for bar in exposed] == pytest.approx([30, 20, 20, 120, 40, 10])
        assert {bar.get_hatch() for bar in exposed} != {bar.get_hatch() for bar in compute}
