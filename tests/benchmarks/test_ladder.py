"""The ladder compares within a round, checks its targets and draws its measurements. Nothing is timed here."""

import contextlib
import io
import json

import pytest
import torch
import torch.distributed as dist

from benchmarks import ladder, report, stages
from benchmarks.ladder import Measurement, Setting
from benchmarks.rungs import ALONE, DDP_VIEW, FLAT, MODELS, RUNGS, TUNED, TUNED_STAGE, same_as
from benchmarks.stages import STAGES, STATE, StageResult, predicted
from shared import ranks
from shared.deadlines import scaled

# Each round is slower than the one before for everybody: ratios of medians would hide that ours is always ahead.
ROUNDS_MS = {ALONE: [8, 80, 800], DDP_VIEW: [10, 100, 1000], FLAT: [10, 100, 1000]}
ROUNDS_MS |= {"DDP": [11, 110, 1100], "ManualDDP": [20, 200, 2000], "BucketedDDP": [12, 120, 1200]}
ROUNDS_MS |= {"OverlappedDDP": [9, 90, 900]}


def setting(model: str = "TinyGPT", link: str = "loopback", ranks: int = 2) -> Setting:
    measured = {name: Measurement(times_ms, 3, 41.5, 43.0, 100.0) for name, times_ms in ROUNDS_MS.items()}
    return Setting("averaging", model, link, ranks, measured)


def test_ratios_and_differences_compare_within_a_round():
    assert setting().ratios("OverlappedDDP") == pytest.approx([0.9, 0.9, 0.9])
    assert setting().ratios("BucketedDDP", over=FLAT) == pytest.approx([1.2, 1.2, 1.2])
    assert setting().more_than_alone_ms("ManualDDP") == 120


def test_a_round_lasts_until_its_slowest_rank_is_done():
    per_rank = [{"DDP": Measurement([1, 5], 3, 2.0, 4.0, 7.0)}, {"DDP": Measurement([4, 2], 3, 2.5, 4.5, 6.0)}]
    assert ladder.merged(per_rank) == {"DDP": Measurement([4, 5], 3, 2.5, 4.5, 7.0)}


def test_aims_are_met_or_missed_by_the_median_ratio():
    met = {row.what.removeprefix("TinyGPT, 2 ranks, loopback: "): row.met for row in ladder.targets([setting()])}
    assert met == {
        "time, OverlappedDDP / DDP, bucket view": True,
        "time, BucketedDDP / flat": False,
        "peak memory, BucketedDDP / DDP": True,
        "peak memory, OverlappedDDP / DDP, bucket view": True,
    }
    assert not all(row["met"] for row in json.loads(ladder.as_json({}, [setting()], rounds=3))["targets"])


def test_the_table_has_a_line_per_strategy_and_setting():
    lines = ladder.as_table([setting(), setting(ranks=4)]).splitlines()
    assert len(lines) == 1 + 2 * len(ROUNDS_MS)
    (overlapped,) = [line.split() for line in lines if "OverlappedDDP" in line and " 4 " in line]
    assert overlapped == ["TinyGPT", "loopback", "4", "OverlappedDDP", "90.0", "0.90", "0.90–0.90", *overlapped[7:]]
    assert overlapped[7:] == ["3", "41.50", "43.0", "10.0", "100.0"]


def test_the_page_shows_the_aims_and_the_figure_and_folds_the_measurements():
    text = ladder.as_markdown({"cores": 2}, [setting(), setting(ranks=4, link="1gbit")], rounds=3)
    lines = text.splitlines()
    assert lines[0] == "**6 of 8 aims are met.** One run of 3 rounds: cores 2."
    assert lines[2] == "| aim | TinyGPT, 2 | TinyGPT, 4, 1gbit |"
    assert lines[4:6] == [
        "| time: OverlappedDDP / DDP, bucket view ≤ 1 | 0.90 | 0.90 |",
        "| time: BucketedDDP / flat ≤ 1.1 | **1.20** | **1.20** |",
    ]
    shown, _, folded = text.partition("<details>")
    assert "(results/averaging.png)" in shown and "DeepSpeed" not in text
    rows = [line for line in folded.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * len(ROUNDS_MS) and len({row.count("|") for row in rows}) == 1


def test_the_page_discloses_how_deepspeed_is_tuned():
    lines = ladder.tuned_settings().splitlines()
    assert len(lines) == 2 + sum(len(of_model) for of_model in TUNED.values())
    assert [line for line in lines if '`"stage3_prefetch_bucket_size": 1800000`' in line]


def test_one_command_replaces_the_tables_the_figure_and_the_json_file(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("above\n<!-- ladder averaging -->\nold\n<!-- /ladder averaging -->\nbelow\n")
    monkeypatch.setattr(ladder, "README", tmp_path / "README.md")
    monkeypatch.setattr(ladder, "RESULTS", tmp_path)
    ladder.save("averaging", {"cores": 2}, [setting()], rounds=3)
    page = (tmp_path / "README.md").read_text()
    assert "old" not in page and "**3 of 4 aims are met.**" in page and page.endswith("below\n")
    assert json.loads((tmp_path / "averaging.json").read_text())["rounds"] == 3
    assert (tmp_path / "averaging.png").stat().st_size > 0


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
        alone, more = axes.containers
        assert [bar.get_width() for bar in alone] == [80] * 6
        assert [bar.get_width() for bar in more] == pytest.approx([30, 20, 20, 120, 40, 10])
        assert {bar.get_hatch() for bar in more} != {bar.get_hatch() for bar in alone}


@pytest.mark.parametrize("kind", RUNGS)
def test_every_aim_compares_strategies_that_are_measured(kind):
    rungs = RUNGS[kind]
    for target in (*rungs.times, *rungs.peaks, *rungs.carried):
        assert {target.mine, target.other} <= rungs.builds.keys()


def test_only_like_is_compared_with_like():
    """Kept parameters are compared with kept ones, and what is tuned or coalesced with what is tuned or coalesced."""
    for target in RUNGS["sharding"].times:
        kept = "kept" in target.mine or target.mine == "ZeRO2"  # which never shards the parameters
        if "3" in target.other or "FSDP2" in target.other:
            assert kept == ("kept" in target.other)
        if "ZeRO3" in target.mine:
            assert ("coalesced" in target.mine) == ("coalesced" in target.other or "tuned" in target.other)


def test_coalesced_units_are_the_plain_ones_of_a_model_with_large_blocks():
    large, small = (same_as(RUNGS["sharding"], MODELS[name]()[0]) for name in ("TinyGPT", "many small"))
    assert large["ZeRO3, kept, coalesced"] == "ZeRO3, kept" and large["FSDP2, coalesced"] == "FSDP2"
    assert small == {}


def test_deepspeed_is_tuned_for_every_model():
    for model, _ in (build() for build in MODELS.values()):
        assert TUNED[type(model)].keys() == TUNED_STAGE.keys()


def losses(title: str, model_name: str) -> list[float]:
    """Train for four steps. Returns the losses of this rank's inputs, which differ from the other ranks'."""
    torch.manual_seed(dist.get_rank())  # every strategy broadcasts the parameters of rank 0
    module, inputs = MODELS[model_name]()
    model, optimizer = RUNGS["sharding"].builds[title](module)
    step_losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        getattr(model, "finish_gradient_sync", lambda: None)()
        optimizer.step()
        step_losses.append(loss.item())
    return step_losses


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_name", MODELS)
def test_what_is_tuned_or_coalesced_trains_like_ddp(ranks_end_with_the_module, model_name):
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2)
    expected = ranks.run(losses, DDP_VIEW, model_name, timeout_s=scaled(120))
    for title in RUNGS["sharding"].builds:
        if "tuned" in title or "coalesced" in title:
            found = ranks.run(losses, title, model_name, timeout_s=scaled(120))
            assert found == [pytest.approx(each, abs=1e-4) for each in expected], title


# -- the README's figure of the stages


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_stages_hold_and_send_what_the_formulas_say(four_ranks):
    for stage, measured in enumerate(ranks.run(stages.on_a_rank, 2, 0)[0]):
        formula = predicted(stage)
        assert measured.held_mb == pytest.approx(formula.held_mb, rel=0.001, abs=0.001)  # shards are padded
        assert measured.sent_mb == pytest.approx(formula.sent_mb, rel=0.001)
        assert len(measured.ratios) == 2


@pytest.mark.slow
def test_each_stage_is_drawn_beside_its_formula():
    held_mb = dict.fromkeys((*STATE, "gathered"), 2.0)
    measured = [StageResult(held_mb, 3.0 + stage, [1.0, 1.0 + stage, 9.0]) for stage in range(4)]
    memory, wire, time = stages.figure(measured, [predicted(stage) for stage in range(4)]).axes
    assert [label.get_text() for label in memory.get_yticklabels()] == STAGES
    assert [bar.get_width() for bar in memory.patches[:4]] == [2.0] * 4
    assert [bar.get_width() for bar in wire.patches[::2]] == [3.0, 4.0, 5.0, 6.0]
    assert [bar.get_width() for bar in time.patches] == [1.0, 2.0, 3.0, 4.0]
    lines = stages.as_table(measured, measured).splitlines()
    assert len(lines) == 5 and lines[2].split()[-7:] == ["6.0", "6.0", "2.0", "2.0", "4.0", "4.0", "2.00"]
