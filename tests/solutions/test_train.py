"""The training loop equals one process on the full batch, with every strategy and on any number of ranks.

The functions without `test_` run on the ranks.
"""

import functools
import json
import subprocess
import sys
import unittest.mock
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shared import ranks
from shared.data.tasks import Task, gpt, mlp, rotary_gpt
from shared.formulas import all_reduce_sent_bytes, ring_fraction
from shared.models import GPTConfig
from solutions.course_strategies import moe
from solutions.strategies import STRATEGIES
from solutions.train import Settings, Summary, main, train
from solutions.training_settings import SCHEDULES
from solutions.zero3 import ZeRO3

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPLITTING = [name for name, each in STRATEGIES.items() if each.splits_layers and not each.is_pipelined]
EXACT_STRATEGIES = [
    name for name, each in STRATEGIES.items() if each.provider != "deepspeed" and not each.splits_layers
]
AVERAGING = [name for name in EXACT_STRATEGIES if STRATEGIES[name].stage == 0]
# Passes over the parameters with three micro-batches. FSDP1 keeps unsharded gradients until the last one.
SHARDING = {"zero1": 2, "zero2": 2, "zero3": 3 * 3, "fsdp1": 3 * 2 + 1, "fsdp2": 3 * 3}
SMALL_GPT = GPTConfig(context=8, layers=1, heads=2, width=16)  # The tied embedding gets two gradients.
EXACT = Settings(steps=6, global_batch=24, optimizer="sgd", learning_rate=0.1, double=True)

# SGD passes the rounding of a gradient on unchanged: about 1e-16 a step for gradients and weights below 1. It grows
# little in these few steps, while a gradient that is summed instead of averaged, or lost, is off by 1e-3 or more.
SGD_TOLERANCE = 1e-12
# Adam divides by the gradient's own size, or at least by eps = 1e-8. It can turn a rounding of 1e-17, in a gradient
# near 0, into 1e-9 of the learning rate (3e-3) per step. It hardly notices a wrong scale, so most tests here use SGD.
ADAM_TOLERANCE = 1e-10


def small_task(settings: Settings) -> Task:
    dtype = torch.float64 if settings.double else torch.float32
    return gpt(settings.seed, dtype, SMALL_GPT) if settings.model == "gpt" else mlp(settings.seed, dtype)


def trained(settings: Settings) -> tuple[Summary, list[torch.Tensor]]:
    """Train. Return the summary, and the parameters, assembled if they are shards."""
    task, built, strategy = small_task(settings), [], STRATEGIES[settings.strategy]

    def wrap(module, options):
        built.extend(strategy.wrap(module, options))
        return built

    with unittest.mock.patch.dict(STRATEGIES, {settings.strategy: replace(strategy, wrap=wrap)}):
        summary = train(settings, task=task)
    return summary, whole_parameters(built[0], task.module)


HEADS_FOR_FOUR = replace(SMALL_GPT, heads=4)


def train_gpt(settings: Settings) -> Summary:
    return train(settings, task=gpt(settings.seed, torch.float64 if settings.double else torch.float32, HEADS_FOR_FOUR))


def whole_parameters(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    if isinstance(model, ZeRO3):
        whole = model.full_state_dict()
        return [whole[name] for name, _ in module.named_parameters()]
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [each.detach().clone() for each in module.parameters()]
    return [getattr(each.detach(), "full_tensor", each.detach)() for each in module.parameters()]


@functools.cache
def one_process(settings: Settings, small: bool = True) -> tuple[list[float], list[torch.Tensor]]:
    """Train with a plain loop over full batches, without a strategy or a group. Return losses and parameters."""
    task, losses = small_task(settings) if small else gpt(settings.seed, torch.float64), []
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
    optimizer = make(task.module.parameters(), lr=settings.learning_rate)
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        x, y = task.pick(torch.randint(task.length, (settings.global_batch,), generator=draw))
        loss = nn.functional.cross_entropy(task.module(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in task.module.parameters()]


def losses_of_one_process(settings: Settings, task: Task) -> list[float]:
    """Train a task with SGD and a plain loop over full batches. Return the losses."""
    losses, optimizer = [], torch.optim.SGD(task.module.parameters(), lr=settings.learning_rate)
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        loss = task.module(*task.pick(torch.randint(task.length, (settings.global_batch,), generator=draw)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@functools.cache
def summary_of(settings: Settings) -> Summary:
    """Train on the ranks, and only once for all tests that compare with it. Return the summary of rank 0."""
    return ranks.run(trained, settings)[0][0]


def assert_equals_one_process(settings: Settings, tolerance: float) -> None:
    losses, parameters = one_process(replace(settings, strategy="none", accumulate=1))
    for summary, found in ranks.run(trained, settings):
        assert summary.losses == pytest.approx(losses, rel=0, abs=tolerance)
        for actual, expected in zip(found, parameters, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("strategy", EXACT_STRATEGIES)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3, 4])
def test_every_strategy_equals_one_process_on_the_full_batch(four_ranks, world_size, strategy):
    with ranks.world(world_size):
        for model, accumulate in [("mlp", 1), ("gpt", 2)]:
            settings = replace(EXACT, strategy=strategy, model=model, accumulate=accumulate)
            assert_equals_one_process(settings, SGD_TOLERANCE)


@pytest.mark.parametrize("strategy", EXACT_STRATEGIES)
def test_adam_equals_one_process(four_ranks, strategy):
    settings = replace(EXACT, strategy=strategy, model="gpt", optimizer="adamw", learning_rate=3e-3)
    assert_equals_one_process(settings, ADAM_TOLERANCE)


@pytest.mark.chapter("tensor_parallel")
@pytest.mark.parametrize("strategy", SPLITTING)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_split_layers_train_as_one_process(four_ranks, world_size, strategy):
    """The vocabulary of the text has 94 tokens, so that 4 ranks pad it."""
    settings = replace(EXACT, strategy=strategy, model="gpt", accumulate=2)
    losses = losses_of_one_process(settings, gpt(settings.seed, torch.float64, HEADS_FOR_FOUR))
    with ranks.world(world_size):
        for summary in ranks.run(train_gpt, settings):
            assert summary.losses == pytest.approx(losses, rel=0, abs=SGD_TOLERANCE)


def train_rotary_gpt(settings: Settings) -> Summary:
    return train(settings, task=rotary_gpt(settings.seed, torch.float64, SMALL_GPT))


@pytest.mark.chapter("context_parallel")
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)], ids=lambda sizes: "dp{}-cp{}".format(*sizes)
)
def test_sequences_on_several_ranks_train_as_in_one_process(four_ranks, sizes):
    dp, cp = sizes
    settings = replace(EXACT, strategy="cp", model="rotary-gpt", accumulate=2, dp=dp, cp=cp)
    losses = losses_of_one_process(settings, rotary_gpt(settings.seed, torch.float64, SMALL_GPT))
    with ranks.world(dp * cp):
        for summary in ranks.run(train_rotary_gpt, settings):
            assert summary.losses == pytest.approx(losses, rel=0, abs=SGD_TOLERANCE)


@pytest.mark.chapter("tensor_parallel")
@pytest.mark.parametrize("strategy", SPLITTING)
def test_split_layers_learn_in_bf16_and_send_less(four_ranks, strategy):
    settings = Settings(strategy=strategy, model="gpt", steps=8, global_batch=8, bf16=True)
    exact = ranks.run(train_gpt, replace(settings, bf16=False))[0]
    for summary in ranks.run(train_gpt, settings):
        assert summary.losses == pytest.approx(exact.losses, abs=0.1) and summary.losses != exact.losses
        assert summary.sent_mb_per_step < exact.sent_mb_per_step


def train_moe(settings: Settings) -> Summary:
    return train(settings, task=moe(settings.seed, torch.float64 if settings.double else torch.float32, SMALL_GPT))


@pytest.mark.chapter("expert_parallel")
@pytest.mark.parametrize("strategy", ["ep", "ddp", "zero1", "zero3"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_experts_train_as_in_one_process(four_ranks, world_size, strategy):
    settings, losses = replace(EXACT, strategy=strategy, model="moe", accumulate=2), []
    task, draw = moe(settings.seed, torch.float64, SMALL_GPT), torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.SGD(task.module.parameters(), lr=settings.learning_rate)
    for _ in range(settings.steps):
        x, y = task.pick(torch.randint(task.length, (settings.global_batch,), generator=draw))
        loss = nn.functional.cross_entropy(task.module(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with ranks.world(world_size):
        for summary in ranks.run(train_moe, settings):
            assert summary.losses == pytest.approx(losses, rel=0, abs=SGD_TOLERANCE)


@pytest.mark.chapter("expert_parallel")
def test_sharded_experts_take_less_memory(four_ranks):
    settings = Settings(strategy="ep", model="moe", steps=6, global_batch=8)
    sharded, whole = (ranks.run(train, replace(settings, strategy=name))[0] for name in ("ep", "manual_ddp"))
    assert sharded.losses == pytest.approx(whole.losses, abs=1e-3)
    assert sharded.peak_mb < 0.7 * whole.peak_mb


@pytest.mark.chapter("expert_parallel")
def test_experts_that_three_ranks_cannot_share_are_rejected_on_every_rank(four_ranks):
    def message(settings: Settings) -> str:
        try:
            train(settings)
        except ValueError as error:
            return str(error)
        return ""

    with ranks.world(3):
        found = ranks.run(message, Settings(strategy="ep", model="moe", steps=6, global_batch=9))
    assert set(found) == {"cannot divide 8 experts evenly among 3 ranks: choose a multiple of 3 experts"}


SIX_CHUNKS = replace(SMALL_GPT, layers=4)


def train_deep_gpt(settings: Settings) -> Summary:
    return train(settings, task=gpt(settings.seed, torch.float64, SIX_CHUNKS))


@pytest.mark.chapter("pipeline_parallel")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pipelines_train_as_one_process(four_ranks, world_size, schedule):
    settings = replace(EXACT, strategy="pp", model="gpt", schedule=schedule, micro_batches=6)
    losses = losses_of_one_process(settings, gpt(settings.seed, torch.float64, SIX_CHUNKS))
    with ranks.world(world_size):
        for summary in ranks.run(train_deep_gpt, settings):
            assert summary.losses == pytest.approx(losses, rel=0, abs=SGD_TOLERANCE)


@pytest.mark.chapter("3d_parallelism")
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_meshes_train_as_one_process(four_ranks, sizes, zero_stage):
    dp, pp, tp = sizes
    mesh = {"dp": dp, "pp": pp, "tp": tp, "zero_stage": zero_stage}
    settings = replace(EXACT, strategy="3d", model="gpt", micro_batches=3, **mesh)
    losses = losses_of_one_process(settings, gpt(settings.seed, torch.float64, SIX_CHUNKS))
    with ranks.world(dp * pp * tp):
        for summary in ranks.run(train_deep_gpt, settings):
            assert summary.losses == pytest.approx(losses, rel=0, abs=SGD_TOLERANCE)


@pytest.mark.parametrize("strategy", AVERAGING)
def test_a_step_sends_each_gradient_once_however_many_micro_batches_it_has(four_ranks, strategy):
    for summary, parameters in ranks.run(trained, replace(EXACT, strategy=strategy, accumulate=3)):
        sent_bytes = all_reduce_sent_bytes(sum(parameter.nbytes for parameter in parameters), 4)
        assert summary.sent_mb_per_step == pytest.approx(sent_bytes / 1e6)
        assert summary.messages_per_step == (len(parameters) if strategy in ("manual_ddp", "ep") else 1)
        assert summary.peak_mb > 2 * sum(parameter.nbytes for parameter in parameters) / 1e6
        assert (summary.world_size, summary.parameters) == (4, sum(each.numel() for each in parameters))


@pytest.mark.chapter("less_communication")
@pytest.mark.parametrize("compress", ["int8", "topk", "powersgd"])
def test_compressed_gradients_train_and_send_less(four_ranks, compress):
    settings = Settings(steps=40, compress=compress)
    plain = summary_of(replace(settings, compress="none"))
    for summary, _ in ranks.run(trained, settings):
        assert summary.sent_mb_per_step < 0.3 * plain.sent_mb_per_step
        assert summary.loss_last < 0.5 * summary.loss_first and summary.losses != plain.losses


@pytest.mark.parametrize(("strategy", "passes"), SHARDING.items())
def test_sharding_sends_what_the_formula_says(four_ranks, strategy, passes):
    """Allow one percent, because shards are padded to equal lengths."""
    for summary, parameters in ranks.run(trained, replace(EXACT, strategy=strategy, accumulate=3)):
        sent_bytes = passes * ring_fraction(4) * sum(parameter.nbytes for parameter in parameters)
        assert summary.sent_mb_per_step == pytest.approx(sent_bytes / 1e6, rel=0.01)


@pytest.mark.parametrize("strategy", SHARDING)
def test_sharding_holds_less_than_data_parallelism(four_ranks, strategy):
    settings = replace(EXACT, optimizer="adamw", bucket_cap_mb=0.05)  # small, so that there are several buckets
    peaks_mb = [summary_of(replace(settings, strategy=name)).peak_mb for name in ("ddp", strategy)]
    assert peaks_mb[1] < 0.8 * peaks_mb[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", EXACT_STRATEGIES)
def test_bf16_learns_and_keeps_float32_weights(four_ranks, strategy):
    settings = Settings(strategy=strategy, steps=20, accumulate=2, bf16=True)
    exact = summary_of(replace(settings, strategy="ddp", bf16=False))
    for summary, parameters in ranks.run(trained, settings):
        assert summary.loss_last < 0.5 * summary.loss_first
        assert summary.losses == pytest.approx(exact.losses, abs=0.1) and summary.losses != exact.losses
        assert {parameter.dtype for parameter in parameters} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(strategy="zero9"), "there is no strategy 'zero9': choose one of ddp, manual_ddp, "),
        (Settings(global_batch=25), "global_batch must be a positive multiple of 2, .* times accumulate .1., got 25"),
        (Settings(global_batch=12, accumulate=4), "multiple of 8, .* ranks .2. times accumulate .4., got 12"),
        (Settings(accumulate=0), "accumulate must be at least 1, got 0"),
        (Settings(strategy="tp"), "strategy tp splits a GPT's layers: choose model 'gpt', not 'mlp'"),
        (Settings(strategy="tp", model="gpt", global_batch=9, accumulate=2), "multiple of 2, accumulate .2., got 9"),
        (Settings(steps=4), "steps must be above 4"),
        (Settings(strategy="pp", model="gpt", pp=4), "pp must be the number of ranks .2., got 4"),
        (Settings(strategy="pp", model="gpt", global_batch=12), "multiple of micro_batches .8., got 12"),
        (Settings(strategy="pp", model="gpt", bf16=True), "it cannot use bf16"),
        (Settings(strategy="pp", model="gpt", accumulate=2), "strategy pp takes one micro-batch per step, got 2"),
        (Settings(strategy="pp", model="gpt", schedule="2f"), "there is no schedule '2f': choose one of gpipe, 1f1b"),
        (Settings(strategy="3d", model="gpt", dp=2, pp=2), "dp .2. times pp .2. times tp .1. must be .* which is 2"),
        (Settings(strategy="3d", model="gpt", tp=4), "dp .1. times pp .1. times tp .4. must be .* which is 2"),
        (Settings(strategy="3d", model="gpt", dp=0), "dp, pp and tp must be positive, got dp=0, pp=0, tp=1"),
        (Settings(strategy="3d", model="gpt", dp=2, zero_stage=2), "zero_stage must be 0 or 1, got 2"),
        (
            Settings(strategy="3d", model="gpt", dp=2, global_batch=24),
            "multiple of dp .2. times micro_batches .8., got",
        ),
        (Settings(strategy="3d", model="gpt", bf16=True), "it cannot use bf16"),
        (Settings(strategy="tp", model="gpt", tp=2), "strategy tp has no mesh: dp, tp and zero_stage are for"),
        (Settings(strategy="cp"), "strategy cp splits a GPT's layers: choose model 'gpt', not 'mlp'"),
        (Settings(strategy="cp", model="gpt", dp=2, cp=2), "dp .2. times cp .2. must be the number of ranks, .* is 2"),
        (Settings(strategy="cp", model="gpt", tp=2), "mesh of dp and cp only: pp, tp and zero_stage are for"),
        (Settings(strategy="cp", model="gpt", dp=2, global_batch=9), "multiple of 2, accumulate .1., got 9"),
        (Settings(strategy="tp", model="gpt", cp=2), "cp is for strategy cp, not for tp"),
        (Settings(compress="int9"), "there is no compress 'int9': choose one of none, int8, topk, powersgd"),
        (Settings(strategy="zero1", compress="int8"), "zero1 cannot compress .* use compress with overlapped_ddp"),
        (Settings(bf16=True, double=True), "bf16 and double cannot be combined"),
        (Settings(strategy="deepspeed2", accumulate=2), "strategy deepspeed2 takes one micro-batch per step, got 2"),
        (Settings(strategy="deepspeed2", double=True), "it cannot train in double precision"),
    ],
)
def test_impossible_settings_are_rejected_with_one_sentence(settings, words):
    if reason := getattr(STRATEGIES.get(settings.strategy), "why_not", lambda: None)():
        pytest.skip(reason)
    with pytest.raises(ValueError, match=words) as rejected:
        settings.check(world_size=2)
    assert "\n" not in str(rejected.value)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_as_torchs_ddp_does(four_ranks, stage):
    """Compare with torch's DDP, because DeepSpeed keeps fp32 weights and cannot match one process in float64."""
    if reason := STRATEGIES[f"deepspeed{stage}"].why_not():
        pytest.skip(reason)
    settings = Settings(model="gpt", steps=6, global_batch=8)
    with ranks.world(2):
        expected, found = (
            ranks.run(train, replace(settings, strategy=name))[0] for name in ("ddp", f"deepspeed{stage}")
        )
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)
    assert found.loss_last < found.loss_first


# -- as a script

SCRIPT = Settings(model="gpt", steps=6, global_batch=4, double=True)
ARGUMENTS = ["--model", "gpt", "--steps", "6", "--global-batch", "4", "--double"]


@pytest.mark.slow
def test_the_script_under_torchrun_trains_as_one_process():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "solutions.train"]
    command = [sys.executable, *launcher, *ARGUMENTS, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert (summary["world_size"], summary["strategy"], summary["steps"]) == (2, "overlapped_ddp", 6)
    assert summary["losses"] == pytest.approx(one_process(SCRIPT, small=False)[0], rel=0, abs=ADAM_TOLERANCE)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.chapter("3d_parallelism")
def test_the_script_trains_on_a_mesh_of_eight_ranks():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8", "-m", "solutions.train"]
    mesh = ["--strategy", "3d", "--dp", "2", "--pp", "2", "--tp", "2", "--zero-stage", "1", "--micro-batches", "2"]
    command = [sys.executable, *launcher, *ARGUMENTS, *mesh, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert (summary["world_size"], summary["strategy"]) == (8, "3d")
    assert summary["losses"] == pytest.approx(one_process(SCRIPT, small=False)[0], rel=0, abs=ADAM_TOLERANCE)


@pytest.fixture
def script(monkeypatch):
    """Return a function that runs main() with arguments in this process, which torchrun did not start."""
    threads = torch.get_num_threads()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        main()

    yield run
    torch.set_num_threads(threads)


def test_without_torchrun_the_script_is_a_world_of_one(script, tmp_path, capsys):
    script(*ARGUMENTS, "--json", str(tmp_path / "summary.json"))
    printed = capsys.readouterr().out
    assert printed.startswith("overlapped_ddp, gpt on 1 × ") and printed.count("\n") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world_size"], summary["sent_mb_per_step"]) == (1, 0.0)
    assert summary["losses"] == pytest.approx(one_process(SCRIPT, small=False)[0], rel=0, abs=ADAM_TOLERANCE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "zero9"], "there is no strategy 'zero9': choose one of ddp, "),
        (["--json", "no/such/folder/x.json"], "there is no folder no/such/folder"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_a_bad_argument_is_rejected_with_one_sentence(script, capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        script(*arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err
