"""The estimator: exact with made-up clocks, and the same on all ranks. Nothing here depends on real times.

The functions without `test_` run on the ranks.
"""

import contextlib
import io
import pickle
import statistics

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import formulas, measure, ranks, timeline
from shared.measure import claims, fitting, steps
from shared.measure.rounds import in_ms
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from shared.ranks import rankside
from shared.wire import instrumentation


def times(*rounds_s: float) -> measure.Times:
    return measure.Times({"": rounds_s})


# -- the time of a job


def test_time_runs_from_the_last_that_enters_to_the_last_that_leaves():
    """Rank 1 enters 3 s later than rank 0, and rank 0 leaves last."""
    marks_s = [[[10.0, 14.5]], [[13.0, 14.0]]]
    assert measure.Times.of_marks(["call"], marks_s).rounds_s == (1.5,)


def test_phases_end_when_the_last_rank_has_left_them_and_add_up():
    marks_s = [[[0.0, 1.0, 5.0]], [[0.5, 2.0, 4.0]]]
    found = measure.Times.of_marks(["forward", "backward"], marks_s)
    assert found.phases_s == {"forward": (1.5,), "backward": (3.0,)}
    assert found.rounds_s == (4.5,)


def test_estimate_is_the_median_and_one_slow_round_does_not_change_it():
    found = times(2.0, 1.0, 3.0, 400.0, 2.5)
    assert (found.time_s, found.time_ms, found.fastest_s) == (2.5, 2500.0, 1.0)


def test_ratio_compares_jobs_round_by_round():
    found = measure.Measured({"ours": times(1.0, 4.0, 30.0), "torch": times(2.0, 5.0, 60.0)}, 2, "nowhere")
    assert found.ratio("torch", "ours") == 2.0


class MadeUpClock:
    """Every job takes as long as it says, and the barrier takes no time."""

    def __init__(self, begins_s: float):
        self.time_s = begins_s

    def read(self) -> float:
        return self.time_s

    def job(self, *lasts_s: float):
        remaining_s = list(lasts_s)

        def run() -> None:
            self.time_s += remaining_s.pop(0)

        return run


def with_made_up_clocks() -> measure.Measured:
    """Rank 0's clock is 0.5 s ahead when the first job begins. Rank 1 takes 1 s longer for each job."""
    slower_s = float(dist.get_rank())
    clock = MadeUpClock(0.5 if slower_s == 0 else 0.0)
    job = clock.job(50 + slower_s, 60 + slower_s, 1 + slower_s, 3 + slower_s, 2 + slower_s)
    return measure.jobs({"job": job}, rounds=3, warm_up_rounds=2, now_s=clock.read)


@pytest.mark.slow
def test_all_ranks_return_the_same_exact_times_without_the_warm_up(world):
    both = ranks.run(with_made_up_clocks)
    assert both[0] == both[1]
    # Each round begins with the clocks further apart: after warming up by 1.5 s, then by 2.5 s and by 3.5 s.
    assert both[0]["job"].rounds_s == (2.0, 4.0, 3.0)
    assert both[0].ranks == 2 and "loopback" in both[0].where


def orders() -> list[str]:
    called = []
    to_time = {name: lambda name=name: called.append(name) for name in "abcdef"}
    measure.jobs(to_time, rounds=4, warm_up_rounds=1)
    return called


def test_jobs_take_turns_in_an_order_that_all_ranks_share(world):
    first, second = ranks.run(orders)
    rounds = [first[begin : begin + 6] for begin in range(0, 30, 6)]
    assert first == second and all(sorted(each) == list("abcdef") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def preparation_and_phases() -> tuple[list[str], list[str]]:
    called = []
    phases = {name: lambda name=name: called.append(name) for name in ("first", "second")}
    found = measure.jobs({"job": measure.Job(phases, lambda: called.append("prepare"))}, rounds=1, warm_up_rounds=0)
    return called, list(found["job"].phases_s)


def test_preparation_comes_before_the_phases_and_does_not_count(world):
    assert ranks.run(preparation_and_phases)[0] == (["prepare", "first", "second"], ["first", "second"])


def checks_while_measuring() -> tuple[int, int]:
    during = []
    measure.jobs({"job": lambda: during.append(len(instrumentation.before_launch))}, rounds=1, warm_up_rounds=0)
    return during[0], len(instrumentation.before_launch)


def test_mismatch_detection_is_paused_while_measuring_and_resumes(world):
    assert ranks.run(checks_while_measuring) == [(0, 1), (0, 1)]


def test_one_process_without_a_group_can_measure_too():
    clock = MadeUpClock(0.0)
    found = measure.jobs({"job": clock.job(9, 1, 2)}, rounds=2, warm_up_rounds=1, now_s=clock.read)
    assert found["job"].rounds_s == (1, 2) and found.ranks == 1 and found.where == "in one process"


def test_rounds_can_be_limited_from_outside(monkeypatch):
    monkeypatch.setenv("COURSE_ROUNDS", "2")
    for rounds, measured in ((5, 2), (1, 1)):
        found = measure.jobs({"job": lambda: None}, rounds=rounds, warm_up_rounds=0)
        assert len(found["job"].rounds_s) == measured


def measured_over_simulated_nccl() -> measure.Sweep:
    return measure.collectives({"all-reduce": dist.all_reduce}, (400, 4_000), rounds=2)


@pytest.mark.slow
def test_collectives_that_return_before_they_are_complete_are_waited_for():
    """Over simulated NCCL, an output that nothing waited for would hold garbage, and using it would raise."""
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2, backend="gloo:cpu", simulate="nccl")
    try:
        found, other = ranks.run(measured_over_simulated_nccl)
    finally:
        ranks.stop()
    assert found == other and found["all-reduce"][400].time_s > 0


# -- recordings


def test_median_round_is_one_that_was_measured():
    assert times(5.0, 1.0, 3.0).median_round == 2
    assert times(4.0, 1.0, 3.0, 9.0).median_round == 2  # the faster of the two in the middle


def recordings() -> tuple[dict, int]:
    opened = []

    @contextlib.contextmanager
    def record():
        opened.append([])
        yield opened[-1]

    def job(name: str) -> measure.Job:
        phases = {str(phase): lambda phase=phase: opened[-1].append((name, phase, dist.get_rank())) for phase in (1, 2)}
        return measure.Job(phases, prepare=opened.clear)

    return measure.recorded({"a": job("a"), "b": job("b")}, record, rounds=3, warm_up_rounds=1), len(opened)


@pytest.mark.slow
def test_recordings_of_one_round_come_from_all_ranks_without_the_preparation(world):
    (found, opened), (other, _) = ranks.run(recordings)
    assert found == other and opened == 1
    assert found == {name: [[(name, 1, rank), (name, 2, rank)] for rank in range(2)] for name in "ab"}


def numbered_recordings() -> list:
    numbers = iter((9, 5, 3, 1) if dist.get_rank() == 0 else (9, 1, 2, 3))  # the first one warms up

    def record():
        return contextlib.nullcontext(next(numbers))

    return measure.recorded({"": lambda: None}, record, by=float, rounds=3, warm_up_rounds=1)[""]


def test_recordings_can_be_those_of_the_round_in_which_rank_0s_number_is_the_median(world):
    assert ranks.run(numbered_recordings) == [[3, 2]] * 2


# -- sweeps


def sweep() -> measure.Sweep:
    calls = {"all-reduce": dist.all_reduce, "broadcast": lambda tensor: dist.broadcast(tensor, src=0)}
    return measure.collectives(calls, (400, 4_000), repeats=2, rounds=3, warm_up_rounds=1)


def test_sweep_has_every_name_and_size_and_is_the_same_on_all_ranks(world):
    found, other = ranks.run(sweep)
    assert found == other and found.sizes_bytes == [400, 4_000] and list(found.times) == ["all-reduce", "broadcast"]
    assert all(time_s > 0 for of in found.measured_s.values() for time_s in of.values())
    assert found.measured_ms["broadcast"][1] == pytest.approx(1e3 * found.measured_s["broadcast"][4_000])
    assert len(found["all-reduce"][400].rounds_s) == 3


def test_time_of_one_of_several_calls_in_a_row():
    assert times(6.0, 9.0).divided_by(3).rounds_s == (2.0, 3.0)


# -- α and β

SIZES = (64, 4_096, 65_536, 1_048_576, 16_777_216)
ALPHA_S, BETA_S = 2e-4, 8e-9


def exact(time_s, ranks_count: int = 4) -> measure.Sweep:
    return measure.Sweep({"job": {size: times(*[time_s(size)] * 5) for size in SIZES}}, ranks_count, "made up")


@pytest.mark.parametrize(
    ("sends", "time_s"),
    [
        ("message", lambda size: ALPHA_S + BETA_S * size),
        ("ring reduce-scatter", lambda size: formulas.ring_all_gather_s(size, 4, ALPHA_S, BETA_S)),
        ("ring all-gather", lambda size: formulas.ring_all_gather_s(size, 4, ALPHA_S, BETA_S)),
        ("ring all-reduce", lambda size: formulas.ring_all_reduce_s(size, 4, ALPHA_S, BETA_S)),
    ],
)
def test_fit_finds_alpha_and_beta_of_exact_times(sends, time_s):
    line = exact(time_s).fit("job", sends)
    assert line.alpha_s == pytest.approx(ALPHA_S) and line.beta_s_per_byte == pytest.approx(BETA_S)
    assert line.alpha_interval_s == pytest.approx((ALPHA_S, ALPHA_S))
    assert line.beta_interval_s_per_byte == pytest.approx((BETA_S, BETA_S))
    assert line.gbit_per_s == pytest.approx(1.0) and line.holds
    assert list(line.measured_over_formula.values()) == pytest.approx([1.0] * len(SIZES))
    assert line.message_s(1_000) == pytest.approx(ALPHA_S + 1_000 * BETA_S)
    assert line.ring_all_reduce_s(1e6, 8) == pytest.approx(formulas.ring_all_reduce_s(1e6, 8, ALPHA_S, BETA_S))


def noisy(seed: int, noise: float = 0.1) -> measure.Sweep:
    draws = torch.Generator().manual_seed(seed)
    of = {}
    for size in SIZES:
        factors = 1 + noise * torch.randn(20, generator=draws).clamp(-3, 3)
        of[size] = times(*((ALPHA_S + BETA_S * size) * factors).tolist())
    return measure.Sweep({"job": of}, 2, "made up")


def test_intervals_contain_the_truth_as_often_as_they_say():
    """Nine of ten should. With 40 repetitions, fewer than 30 would be very unlikely, as would be 40 very wide ones."""
    lines = [noisy(seed).fit("job") for seed in range(40)]
    inside = [line.alpha_interval_s[0] <= ALPHA_S <= line.alpha_interval_s[1] for line in lines]
    inside_beta = [line.beta_interval_s_per_byte[0] <= BETA_S <= line.beta_interval_s_per_byte[1] for line in lines]
    assert sum(inside) >= 30 and sum(inside_beta) >= 30
    width = statistics.fmean(line.alpha_interval_s[1] - line.alpha_interval_s[0] for line in lines)
    assert 0 < width < 0.2 * ALPHA_S


def test_small_sizes_count_as_much_as_large_ones():
    """A tenth more at the largest size changes α by less than a tenth, although it is 1,000 α."""
    off = {size: times(1.1 * (ALPHA_S + BETA_S * size) if size == SIZES[-1] else ALPHA_S + BETA_S * size)
           for size in SIZES}  # fmt: skip
    assert measure.Sweep({"job": off}, 2, "made up").fit("job").alpha_s == pytest.approx(ALPHA_S, rel=0.1)


def test_residuals_say_where_the_formula_does_not_hold():
    def time_s(size: int) -> float:
        return (ALPHA_S + BETA_S * size) * (4.0 if size == 65_536 else 1.0)

    line = exact(time_s).fit("job")
    assert not line.holds and line.worst[0] == 65_536
    assert "does not hold here: at 65,536 bytes" in str(line) and "made up" in str(line)


def test_negative_latency_does_not_hold():
    line = fitting.fit({1_000: times(1.0), 2_000: times(2.5)})
    assert line.alpha_s < 0 and not line.holds and "must both be above 0" in line.verdict


# -- links


def behind_a_link() -> tuple[str, str, str, float]:
    before = measure.where()
    with measure.behind_link("8mbit", latency_ms=1.0) as link:  # 1 µs per byte
        found = measure.collectives({"all-reduce": dist.all_reduce}, (50_000,), rounds=1, warm_up_rounds=0)
    assert not instrumentation.work_wrappers
    return before, str(link), found.where, found["all-reduce"][50_000].fastest_s


def test_results_say_that_a_link_was_emulated_and_times_contain_it(world):
    for before, during, where, time_s in ranks.run(behind_a_link):
        assert "loopback" in before and during == where
        assert where == "behind an emulated link of 0.008 Gbit/s and 1 ms per message"
        assert time_s > 0.05  # the rank that entered last occupies its own link for 50 ms of bytes


def link_after_link() -> list[str]:
    link = measure.behind_link("8mbit")
    again = measure.behind_link("16mbit")
    wrappers, where = len(instrumentation.work_wrappers), again.where
    again.close()
    link.close()
    return [wrappers, where, measure.where(), len(instrumentation.work_wrappers)]


def test_second_link_replaces_the_first(world):
    wrappers, where, after, left = ranks.run(link_after_link)[0]
    assert wrappers == 1 and "0.016 Gbit/s" in where and "loopback" in after and left == 0


def star(tensor: torch.Tensor) -> None:
    dist.reduce(tensor, dst=0)
    dist.broadcast(tensor, src=0)


def both_ways() -> dict[str, measure.Sweep]:
    calls = {"star": star, "ring": dist.all_reduce}
    return measure.loopback_and_link(calls, (4_000, 8_000), "8mbit", 0.0, rounds=1, warm_up_rounds=0)


def test_loopback_and_link_have_the_same_collectives_and_sizes(world):
    found = ranks.run(both_ways)[0]
    assert list(found) == ["loopback", "link"] and "loopback" in found["loopback"].where
    assert "emulated" in found["link"].where
    assert found["loopback"].measured_s.keys() == found["link"].measured_s.keys()
    assert found["link"]["ring"][8_000].time_s > 0.008  # 8 ms of bytes


# -- training steps and scaling

CONFIG = GPTConfig(layers=2)


class Averaging(nn.Module):
    """A wrapper with the course's interface, which counts what was called."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.syncs, self.calls = module, True, []

    def forward(self, *batch):
        self.calls.append(f"forward, sync={self.syncs}")
        return self.module(*batch)

    @contextlib.contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True

    def finish_gradient_sync(self) -> None:
        self.calls.append("finish")


def two_steps() -> tuple[measure.Measured, list[str]]:
    model = Averaging(TinyGPT(CONFIG))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    steps = {"step": measure.training_step(model, tokens, tokens)}
    steps["without communication"] = measure.training_step(model, tokens, tokens, sync=False)
    return measure.jobs(steps, rounds=1, warm_up_rounds=0), sorted(model.calls)


def measured_steps() -> measure.Measured:
    return two_steps()[0]


def test_step_without_communication_neither_sends_nor_finishes(world):
    found, calls = ranks.run(two_steps)[0]
    assert calls == ["finish", "forward, sync=False", "forward, sync=True"]
    assert list(found.parts_ms()["step"]) == ["forward", "backward", "finish"]


def a_recorded_step() -> list[timeline.Timeline]:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return measure.recorded_step(Averaging(TinyGPT(CONFIG)), tokens, tokens, rounds=1)


def test_a_recorded_step_has_a_timeline_of_every_rank(world):
    for lines in ranks.run(a_recorded_step):
        assert [line.rank for line in lines] == [0, 1]
        assert all(line.lane("forward") and line.lane("backward") for line in lines)


def readiness_by_made_up_clocks() -> list[tuple[float, int]]:
    marks_s = iter(range(0, 1000, 1 + dist.get_rank()))
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Flatten(0))
    model.no_sync = contextlib.nullcontext
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "now_s", lambda: next(marks_s))
        return measure.ready_fractions(model, torch.ones(1, 1), rounds=3, warm_up_rounds=1)


def test_gradients_are_ready_after_fractions_of_the_step_of_the_slowest_rank(world):
    found, other = ranks.run(readiness_by_made_up_clocks)
    assert found == other
    assert [fraction for fraction, _ in found] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert [size for _, size in found] == [4] * 4


def made_up_scaling(steps_s: dict[int, tuple[float, float]]) -> measure.Scaling:
    measured = {}
    for count, (alone_s, step_s) in steps_s.items():
        pair = {"step": times(step_s), "without communication": times(alone_s)}
        measured[count] = measure.Measured(pair, count, "nowhere")
    return measure.Scaling(measured)


def test_efficiency_of_weak_scaling_is_the_product_of_its_factors():
    found = made_up_scaling({1: (8.0, 8.5), 4: (10.0, 16.0)})
    assert (found.efficiency(1), found.computation(1), found.communication(1)) == (1.0, 1.0, 1.0)
    assert (found.computation(4), found.communication(4)) == (0.8, 0.625)
    assert found.efficiency(4) == pytest.approx(8 / 16) and found.speed_up(4) == pytest.approx(2.0)


def name_the_function() -> None:
    rankside.get_ipython().user_ns["measured_steps"] = measured_steps


def test_scaling_calls_a_function_of_the_ranks_in_worlds_of_each_size(four_ranks):
    ranks.run(name_the_function)
    found = measure.scaling("measured_steps", counts=(1, 2))
    assert {count: each.ranks for count, each in found.measured.items()} == {1: 1, 2: 2}
    assert found.efficiency(1) == 1.0 and found.efficiency(2) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure.jobs({}, rounds=3), "at least one job and one round"),
        (lambda: measure.jobs({"job": print}, rounds=0), "at least one job and one round"),
        (lambda: measure.collectives({"all-reduce": dist.all_reduce}, ()), "positive multiples of 4"),
        (lambda: measure.collectives({"all-reduce": dist.all_reduce}, (0,)), "positive multiples of 4"),
        (lambda: measure.collectives({"all-reduce": dist.all_reduce}, (400, 401)), "positive multiples of 4"),
        (lambda: fitting.fit({1_000: times(1.0)}), "at least two sizes, got 1"),
        (lambda: exact(lambda size: 1.0).fit("job", "star"), r"sends must be one of 'message', .*, got 'star'"),
        (lambda: measure.scaling("measured_steps", (2, 4)), r"counts must contain 1, got \(2, 4\)"),
    ],
)
def test_what_cannot_be_measured_is_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- a stand-in for a GPU


def test_stand_in_changes_no_value_and_sleeps_as_long_as_it_says(monkeypatch):
    plain, sleeping = TinyGPT(CONFIG), TinyGPT(CONFIG)
    slept_s = []
    monkeypatch.setattr("shared.models.time.sleep", slept_s.append)
    handles = stand_in_for_gpu(sleeping.blocks, forward_ms=2.0, backward_ms=4.0)
    tokens = torch.arange(8)[None]
    for model in (plain, sleeping):
        model(tokens, tokens).backward()
    assert slept_s == [0.002, 0.002, 0.004, 0.004]
    for ours, theirs in zip(sleeping.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for handle in handles:
        handle.remove()
    sleeping(tokens)
    assert len(slept_s) == 4


# -- results


@pytest.mark.parametrize(
    ("time_s", "text"), [(17.3e-6, "0.0173"), (2.5e-3, "2.5"), (0.0495, "49.5"), (0.3644, "364"), (1.484, "1,484")]
)
def test_times_have_three_digits(time_s, text):
    assert in_ms(time_s) == text


def results() -> list:
    found = exact(lambda size: ALPHA_S + BETA_S * size)
    measured = measure.Measured({"job": times(1.0, 2.0)}, 2, "nowhere")
    scaled = made_up_scaling({1: (8.0, 8.0), 2: (8.0, 16.0)})
    return [found, found.fit("job"), measured, scaled]


@pytest.mark.parametrize("result", results(), ids=lambda result: type(result).__name__)
def test_results_display_as_tables_and_travel_from_the_ranks(result):
    assert "<table>" in result._repr_html_() and len(str(result).splitlines()) >= 3
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("why_not", "emulate", "said"),
    [
        ("This machine cannot make hosts.", False, "This machine cannot make hosts."),
        ("", True, "Emulated, not measured"),
    ],
)
def test_starting_behind_a_link_says_which_kind(monkeypatch, why_not, emulate, said):
    monkeypatch.setattr("shared.hosts.why_not", lambda: why_not)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        measure.start_behind_link(2, "100mbit", emulate=emulate)
    try:
        assert said in printed.getvalue() and "kernel" not in printed.getvalue()
    finally:
        ranks.stop()


def test_a_claim_that_does_not_hold_is_an_error_only_while_notebooks_are_built(monkeypatch, capsys):
    monkeypatch.delenv(claims.STRICT, raising=False)
    measure.expect(True, "one is one")
    assert capsys.readouterr().out == ""
    measure.expect(False, "one is two")
    assert capsys.readouterr().out.startswith("In this run, it is not true that one is two.")
    monkeypatch.setenv(claims.STRICT, "1")
    with pytest.raises(AssertionError, match="one is two"):
        measure.expect(False, "one is two")


# -- what a step needs besides time


def test_costs_are_those_of_the_second_step():
    model = nn.Linear(4, 1, bias=False)
    losses = []

    def loss_of(x):
        losses.append(model(x).square().mean())
        return losses[-1]

    wrapper = nn.Module()
    wrapper.inner, wrapper.forward = model, loss_of
    wrapper.finish_gradient_sync = lambda: losses.append("synchronized")
    costs = measure.costs(wrapper, torch.optim.AdamW(model.parameters(), lr=1e-4), torch.ones(2, 4))
    assert losses[1::2] == ["synchronized"] * 2 and losses[2] < losses[0]
    assert costs.held.total_bytes == 4 * 4 * 4 + 4, "weight, gradient, two moments and AdamW's step counter"
    assert costs.peak.peak_bytes > costs.held.total_bytes and costs.log.messages == 0
