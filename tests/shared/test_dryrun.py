"""A dry run on meta counts the same bytes as real ranks and as the formulas, at sizes that no machine here has.

The functions without `test_` run on the ranks.
"""

import contextlib
import functools
import importlib.util
import io
import json
import multiprocessing
import re
import resource
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared import dryrun, formulas, memory, ranks, wire
from shared.dryrun import DryRun, peaks
from shared.dryrun.decoder import MLP, Decoder
from shared.planner.shapes import MIXTRAL, SHAPES, gpt, llama
from shared.planner.stages import stage_parameters
from solutions.strategies import STRATEGIES, mixed_precision

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SMALL = llama("small", 2, 64, 4, 2, 96, vocabulary=50, context=32)
WITH_EXPERTS = replace(SMALL, experts=4, top_k=2)
SHARING = {"cp": SMALL, "ep": replace(SMALL, experts=4, top_k=4)}  # all experts for each token: evenly loaded


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_a_decoder_has_the_published_number_of_parameters(shape):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Decoder(shape).parameters()) == shape.parameters


@pytest.mark.parametrize("shape", [SMALL, gpt("small", 2, 32, 2, context=16)], ids=["llama", "gpt"])
def test_a_decoder_learns_the_same_with_recomputation(shape):
    losses = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Decoder(shape, recompute)
        tokens = torch.randint(shape.vocabulary, (2, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:5] == losses[5:] and losses[4] < 0.8 * losses[0]


def test_recomputing_runs_forward_twice():
    with torch.device("meta"):
        tokens = torch.zeros(1, 32, dtype=torch.long)
        flops = []
        for recompute in (False, True):
            with FlopCounterMode(display=False) as counter:
                Decoder(SMALL, recompute)(tokens, tokens).backward()
            flops.append(counter.get_total_flops())
    assert 1.2 < flops[1] / flops[0] < 4 / 3  # the output layer is not computed again


def counted(strategy: str, sequences: int = 1) -> tuple[float, int]:
    """Do on a real rank what the dry run does on meta. Returns the bytes sent, and the bytes at the peak."""
    dtype, options = mixed_precision(STRATEGIES[strategy], torch.optim.AdamW)
    build_mlp = dryrun.experts_of("solutions") if strategy == "ep" else MLP
    module = Decoder(SHARING.get(strategy, SMALL), recompute=True, build_mlp=build_mlp).to(dtype)
    tokens = torch.zeros(sequences, 32, dtype=torch.long)
    model, optimizer = STRATEGIES[strategy].build(module, options)
    dryrun.take_step(model, optimizer, tokens)
    with wire.ledger() as log, memory.peak(model, optimizer) as peak:
        dryrun.take_step(model, optimizer, tokens)
    return log.sent_bytes, peak.peak_bytes


def small_dry_runs() -> dict:
    """Make the dry runs of small models. By strategy, the bytes sent and those at the peak, and more."""
    found = {}
    for strategy in (*WHOLE, *SPLITTING):
        run = dryrun.dry_run(SMALL, strategy, 2 if strategy in SPLITTING else 4)
        found[strategy] = run.sent_bytes, run.at_peak.total_bytes
    for strategy in SPLITTING:
        for name, shape in SHAPES_TO_SPLIT.items():
            for recompute in (True, False):
                run = dryrun.dry_run(shape, strategy, 2, recompute=recompute)
                own = run.own_parameters_bytes, 2 * dryrun.expected_split_parameters(run.shape, 2)
                found[f"{name} {strategy} {recompute}"] = (run.sent_bytes, dryrun.expected_split_sent_bytes(run)), own
    for strategy, shape in SHARING.items():
        run = dryrun.dry_run(shape, strategy, 4)
        found[strategy] = run.sent_bytes, run.at_peak.total_bytes
    found["pp"] = [dryrun.dry_run(SMALL, "pp", 2, rank=rank, sequence=32).sent_bytes for rank in range(2)]
    return found


@pytest.fixture(scope="module")
def elsewhere():
    """Call a function in another process: a dry run leaves a fake process group behind. All calls share the process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def dry_runs(elsewhere) -> dict:
    return elsewhere(small_dry_runs)


SPLITTING = ["tp", "tp+sp"]
WHOLE = sorted({each.name for each in dryrun.strategies().values() if not each.splits_layers} - set(SHARING))
SHAPES_TO_SPLIT = {"llama": SMALL, "gpt": replace(gpt("small", 2, 32, 4, context=16), vocabulary=48)}


def test_every_strategy_is_in_one_of_these_groups():
    named = {each.name for each in dryrun.strategies().values()}
    assert named == {*WHOLE, *SPLITTING, *SHARING, "pp"}


@pytest.mark.parametrize("strategy", [*WHOLE, *SHARING])
def test_real_ranks_hold_and_send_the_same(four_ranks, dry_runs, strategy):
    """Attention on meta keeps what a GPU's kernel would, so peaks agree roughly. Bytes on the wire agree exactly."""
    sent_bytes, peak_bytes = ranks.run(counted, strategy)[0]
    dry_sent_bytes, dry_peak_bytes = dry_runs[strategy]
    assert dry_sent_bytes == pytest.approx(sent_bytes)
    assert dry_peak_bytes == pytest.approx(peak_bytes, rel=0.2)


@pytest.mark.chapter("tensor_parallel")
@pytest.mark.parametrize("strategy", SPLITTING)
def test_real_ranks_that_split_layers_hold_and_send_the_same(four_ranks, dry_runs, strategy):
    with ranks.world(2):  # SMALL has two heads of keys and values
        sent_bytes, peak_bytes = ranks.run(counted, strategy)[0]
    dry_sent_bytes, dry_peak_bytes = dry_runs[strategy]
    assert dry_sent_bytes == pytest.approx(sent_bytes)
    assert dry_peak_bytes == pytest.approx(peak_bytes, rel=0.2)


@pytest.mark.chapter("tensor_parallel")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("strategy", SPLITTING)
@pytest.mark.parametrize("shape", SHAPES_TO_SPLIT)
def test_split_layers_hold_and_send_what_the_formulas_say(dry_runs, shape, strategy, recompute):
    for found, expected in dry_runs[f"{shape} {strategy} {recompute}"]:
        assert found == pytest.approx(expected)


def found_and_expected(strategy: str, recompute: bool) -> list[tuple]:
    """Make dry runs of several sizes. Returns the bytes sent and held by each, and what the formulas say."""
    pairs = []
    for size in (1, 2, 4):
        for rank in {0, size - 1}:
            run = dryrun.dry_run(WITH_EXPERTS, strategy, size, recompute=recompute, rank=rank)
            expected = {
                "cp": (dryrun.expected_context_sent_bytes, WITH_EXPERTS.parameters),
                "ep": (dryrun.expected_expert_sent_bytes, dryrun.expected_expert_parameters(WITH_EXPERTS, size)),
            }
            sent_bytes_of, parameters = expected[strategy]
            pairs.append(((run.sent_bytes, run.own_parameters_bytes), (sent_bytes_of(run), 2 * parameters)))
    return pairs


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("strategy", ["cp", "ep"])
def test_shared_sequences_and_experts_hold_and_send_what_the_formulas_say(elsewhere, strategy, recompute):
    pairs = elsewhere(found_and_expected, strategy, recompute)
    assert len(pairs) == 5
    for found, expected in pairs:
        assert found == pytest.approx(expected)


def expert_model_held_by_two_ranks(strategy: str, recompute: bool) -> int:
    runs = [dryrun.dry_run(WITH_EXPERTS, strategy, 2, recompute=recompute, rank=rank) for rank in range(2)]
    return sum(run.own_parameters_bytes for run in runs)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("strategy", "bytes_each"), [("zero3", 4), ("pp", 2)])
def test_models_with_experts_also_train_with_strategies_that_do_not_know_them(
    elsewhere, strategy, bytes_each, recompute
):
    held_bytes = elsewhere(expert_model_held_by_two_ranks, strategy, recompute)
    assert held_bytes == pytest.approx(bytes_each * WITH_EXPERTS.parameters)


def test_a_decoder_with_experts_has_the_published_number_of_parameters():
    """Jiang et al. 2024, §1: each token has access to 47B parameters, but uses only 13B."""
    with torch.device("meta"):
        model = Decoder(MIXTRAL, build_mlp=dryrun.experts_of("solutions"))
    assert sum(parameter.numel() for parameter in model.parameters()) == MIXTRAL.parameters
    used = MIXTRAL.parameters - MIXTRAL.layers * (MIXTRAL.mlp_parameters - MIXTRAL.active_mlp_parameters)
    assert [round(MIXTRAL.parameters / 1e9), round(used / 1e9)] == [47, 13]


def said(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Return the exit code of `python -m shared.dryrun` with these arguments, and the last line that it prints."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["dryrun", *arguments]),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as ended,
    ):
        dryrun.main()
    return ended.value.code, printed.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "ep", "--world-size", "8"), "Llama-2 70B has no experts that strategy ep could shard"),
        (
            ("--strategy", "ep", "--model", "mixtral-8x7b", "--world-size", "6"),
            "cannot divide 8 experts evenly",
        ),
        (("--strategy", "tp", "--model", "mixtral-8x7b", "--world-size", "2"), "cannot split layers of experts"),
        (("--strategy", "cp", "--world-size", "48"), "cannot split the sequence evenly: 2048 is not divisible by 96"),
    ],
)
def test_what_cannot_be_shared_is_rejected_in_one_sentence(elsewhere, arguments, message):
    code, last = elsewhere(said, arguments)
    assert code == 2 and message in last


@pytest.mark.chapter("tensor_parallel")
def test_heads_that_do_not_divide_are_rejected_in_one_sentence(elsewhere):
    code, last = elsewhere(said, ("--strategy", "tp", "--world-size", "16"))
    assert code == 2 and "8 heads of keys and values are not divisible by 16" in last


def stages_found_and_expected(schedule: str) -> list[tuple]:
    """Make dry runs of stages. Returns bytes that they send or hold, each with what the formula says."""
    layers = {1: 2, 3: 5, 7: 12 if schedule == "interleaved" else 5}  # a link of the chain for each chunk, and more
    pairs = []
    for tied in (True, False):
        for size, rank in ((3, 0), (3, 1), (3, 2), *[(1, 0), (7, 4)] * tied):
            shape = replace(gpt("small", layers[size], 32, 4, context=16), vocabulary=48, tied=tied)
            run = dryrun.dry_run(shape, "pp", size, rank=rank, schedule=schedule, micro_batches=size)
            parameters = stage_parameters(shape, size, rank, run.chunks)
            pairs.append((run.sent_bytes, dryrun.expected_stage_sent_bytes(run)))
            pairs.append((run.own_parameters_bytes, 2 * parameters))
            pairs.append((run.most_bytes("optimizer"), 12 * parameters))
    return pairs


@pytest.mark.chapter("pipeline_parallel")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_stages_hold_and_send_what_the_formulas_say(elsewhere, schedule):
    pairs = elsewhere(stages_found_and_expected, schedule)
    assert len(pairs) == 24
    assert all(found == pytest.approx(expected) for found, expected in pairs), pairs


@pytest.mark.chapter("pipeline_parallel")
def test_real_stages_send_the_same(four_ranks, dry_runs):
    with ranks.world(2):
        sent_bytes = [sent for sent, _ in ranks.run(counted, "pp", 8)]
    assert dry_runs["pp"] == pytest.approx(sent_bytes)


def of_three_ranks(strategy: str) -> tuple[set, int]:
    """Make the dry runs of three ranks of seven. Returns the different results, and the most padding."""
    runs = [dryrun.dry_run(SMALL, strategy, 7, rank=rank) for rank in (0, 5, 6)]
    sizes = {(run.sent_bytes, run.messages, run.own_parameters_bytes, run.at_peak.total_bytes) for run in runs}
    return sizes, max(run.padding_elements for run in runs) if strategy == "zero3" else 0


def test_every_rank_holds_and_sends_the_same(elsewhere):
    """No size of this model is divisible by 7, so the last ranks have padding."""
    found = {strategy: elsewhere(of_three_ranks, strategy) for strategy in WHOLE}
    assert all(len(sizes) == 1 for sizes, _ in found.values()), found
    units = [SMALL.layer_parameters] * SMALL.layers
    units.append(SMALL.parameters - sum(units))
    assert found["zero3"][1] == sum(-numel % 7 for numel in units) > 0


def large_dry_runs() -> tuple[dict[str, dict[str, int]], DryRun, int]:
    """Count all recorded peaks again. Returns them, the run of 70B on 1024 ranks, and the memory of this process."""
    with mock.patch.object(peaks, "dry_run", functools.cache(dryrun.dry_run)) as dry_run:
        found = peaks.counted_again()
        run = dry_run(SHAPES["Llama-2 70B"], "zero3", 1024, rank=0)
        assert dry_run.cache_info().hits == 1
    return found, run, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def large(elsewhere):
    return elsewhere(large_dry_runs)


def test_the_recorded_peaks_are_those_of_a_dry_run(large):
    assert large[0] == json.loads(peaks.RECORDED.read_text())


def test_large_models_on_many_ranks_fit_into_this_process(large):
    _, run, process_bytes = large
    lines = {line.strip().split("  ")[0]: line.split() for line in str(dryrun.table(run)).splitlines() if line}
    assert float(lines["optimizer"][1]) == pytest.approx(8 * run.shape.parameters / 1024 / 1e9, rel=1e-3)
    assert float(lines["unsharded"][1]) == pytest.approx(dryrun.expected_gathered_bytes(run.shape) / 1e9, rel=1e-3)
    sent_bytes = formulas.step_sent_bytes(run.shape.parameters, 1024, stage=3)
    assert float(lines["sent per step"][3]) == pytest.approx(
        sent_bytes / 1e9, rel=0.01
    )  # the root unit is all-gathered only once
    assert process_bytes < 4.29e9


def printed(*arguments: str) -> str:
    """Run `python -m shared.dryrun` in this process."""
    with (
        mock.patch.object(sys, "argv", ["dryrun", *arguments]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit, match="0"),
    ):
        runpy.run_module("shared.dryrun", run_name="__main__")
    return printed.getvalue()


def test_the_command_prints_the_table_and_what_it_cost(elsewhere):
    first, *_, last = elsewhere(printed, "--model", "gpt-2-124m", "--world-size", "4").splitlines()
    assert "maximum" in first and re.fullmatch(r"This process took .* s and \d\.\d\d GB of memory\.", last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-size", "0"), "must be at least 1"),
        (("--rank", "8", "--world-size", "8"), "--rank must be at least 0 and less than 8"),
        (("--strategy", "zero9"), "there is no strategy 'zero9' for a dry run: choose one of manual_ddp, "),
        (("--strategy", "pp", "--schedule", "fast"), "there is no schedule 'fast': choose one of gpipe, 1f1b, "),
        (("--wrappers", "nowhere"), "--wrappers nowhere: No module named 'nowhere'"),
    ],
)
def test_bad_arguments_are_rejected_in_one_sentence(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["dryrun", *arguments])
    with pytest.raises(SystemExit, match="2"):
        dryrun.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_torchs_names_stand_for_the_courses_counterparts():
    names = {name: strategy.name for name, strategy in dryrun.strategies().items() if name != strategy.name}
    assert names == {"ddp": "overlapped_ddp", "zero_redundancy": "zero1", "deepspeed2": "zero2", "fsdp2": "zero3"}


def test_recorded_peaks_are_shown_without_the_strategys_module(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [row] = peaks.table("zero3", [("llama-70b", 1024)]).rows
    assert len(row) == 3 + len(peaks.PARTS) and 10 < float(row[-1]) < 20
