"""The timeline, compared with torch's profiler, hand-made cases and injected delays; and its figure.

The functions without `test_` run on the ranks. Injected delays are several times larger than the tolerance.
"""

import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import plots, ranks, timeline
from shared.deadlines import scaled
from shared.models import GPTConfig, TinyGPT
from shared.timeline import Span, Timeline
from shared.wire import intervals

pytestmark = pytest.mark.slow

LATE_S = scaled(0.4)
SLACK_MS = scaled(120.0)  # for a machine of two cores that also runs other tests


# -- intervals


def test_merged_intervals_cover_the_same_time():
    assert intervals.merge([(5, 6), (1, 3), (2, 4), (4, 4.5)]) == [(1, 4.5), (5, 6)]
    assert intervals.merge([]) == []
    assert intervals.length_s([(0, 2), (1, 3), (10, 11)]) == 4


def test_subtracted_intervals():
    assert intervals.subtract([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert intervals.subtract([(0, 1), (4, 6)], [(-1, 5)]) == [(5, 6)]
    assert intervals.subtract([(0, 1)], [(2, 3)]) == [(0, 1)]
    assert intervals.subtract([(0, 1)], [(0, 1)]) == []


def test_rows_have_no_overlap():
    spans = [(0, 4), (1, 2), (2, 3), (3.5, 5), (4, 6)]
    assert intervals.rows(spans) == [0, 1, 1, 1, 0]


# -- exposed and hidden time of hand-made timelines


def line_of(*spans: tuple[str, float, float], waits=()) -> Timeline:
    named = [Span(lane, lane, began, ended, 1000 * (lane == "communication")) for lane, began, ended in spans]
    return Timeline(0, named, list(waits), 0.0, 10.0)


@pytest.mark.parametrize(
    ("spans", "waits", "seconds", "overlap"),
    [
        ([("forward", 0, 1), ("backward", 1, 3), ("communication", 3, 5), ("optimizer", 5, 6)], [], (2, 4, 2), 0.0),
        ([("backward", 0, 4), ("communication", 1, 3)], [], (2, 4, 0), 1.0),
        ([("backward", 0, 4), ("communication", 1, 3), ("communication", 2, 6)], [], (5, 4, 2), 0.6),
        ([("backward", 0, 4), ("communication", 1, 3)], [(1, 3)], (2, 2, 2), 0.0),
        ([("forward", 0, 1)], [], (0, 1, 0), 0.0),
    ],
    ids=["after backward", "during backward", "partly after backward", "waited for in backward", "none"],
)
def test_communication_is_exposed_where_nothing_is_computed(spans, waits, seconds, overlap):
    line = line_of(*spans, waits=waits)
    communication_s, compute_s, exposed_s = seconds
    assert (line.communication_ms, line.compute_ms) == (1e3 * communication_s, 1e3 * compute_s)
    assert line.exposed_ms == 1e3 * exposed_s and line.overlap == pytest.approx(overlap)


# -- recorded on real ranks


def a_step(wrap: str) -> Timeline:
    torch.manual_seed(0)
    model = TinyGPT(GPTConfig(vocab_size=50), seed=0)
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1) if wrap == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randint(50, (2, 16))
    for _ in range(2):
        optimizer.zero_grad()
        with timeline.record(wrapped, optimizer) as line:
            wrapped(inputs, inputs).backward()
            if wrap == "by hand":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not any(hooks), "all hooks are removed"
    return line


@pytest.mark.parametrize("world", [2, 4], indirect=True)
@pytest.mark.parametrize("wrap", ["by hand", "ddp", "nothing"])
def test_units_are_recorded_in_forward_and_then_in_reverse_in_backward(world, wrap):
    for rank, line in enumerate(ranks.run(a_step, wrap)):
        forward = [span.name for span in line.spans if span.lane == "forward"]
        backward = [span.name for span in line.spans if span.lane == "backward"]
        assert forward == [name for name, _ in timeline.units_of(TinyGPT(GPTConfig(vocab_size=50)))]
        assert backward[0] == "loss"
        assert backward[1:] == forward[::-1]
        assert [span.name for span in line.spans if span.lane == "optimizer"] == ["step"]
        assert line.rank == rank
        assert all(line.began_s <= span.began_s <= span.ended_s <= line.ended_s for span in line.spans)


def test_communication_by_hand_comes_after_backward_and_is_exposed(world):
    for line in ranks.run(a_step, "by hand"):
        backward_ends_s = max(span.ended_s for span in line.spans if span.lane == "backward")
        communication = [span for span in line.spans if span.lane == "communication"]
        assert len(communication) == len(list(TinyGPT(GPTConfig(vocab_size=50)).parameters()))
        assert all(span.began_s >= backward_ends_s for span in communication)
        assert line.overlap == 0
        assert line.exposed_ms == pytest.approx(line.communication_ms)


def test_ddp_sends_its_first_bucket_while_backward_runs(world):
    for line in ranks.run(a_step, "ddp"):
        backward = [span for span in line.spans if span.lane == "backward"]
        communication = [span for span in line.spans if span.lane == "communication"]
        assert len(communication) > 1, "one span per bucket"
        assert communication[0].began_s < max(span.ended_s for span in backward)


class Sleeper(nn.Module):
    """A unit whose forward takes a while, without using a core."""

    def __init__(self, seconds: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, inputs):
        time.sleep(self.seconds)
        return inputs * self.weight


class Delay:
    """Delays rank 1. The delay begins when rank 0 is about to communicate, so a busy machine adds nothing to it."""

    def __init__(self, folder: Path):
        self._signal = folder / "rank 0 is about to communicate"

    def __call__(self) -> None:
        if dist.get_rank() == 0:
            self._signal.touch()
        elif dist.get_rank() == 1:
            while not self._signal.exists():
                time.sleep(0.001)
            time.sleep(LATE_S)


def compute_while_a_rank_is_delayed(delay: Delay, computes_s: float) -> tuple[Timeline, float, float, float]:
    """Compute after an asynchronous all-reduce was launched.

    Returns:
        The timeline, and three times in ms by the rank's own clock: from the launch to the end of the wait, the
        computation, and the wait after it.
    """
    group, model = dist.new_group(), nn.Sequential(Sleeper(computes_s))
    dist.barrier()
    with timeline.record(model) as line:
        delay()
        launched_s = time.monotonic()
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        computes_from_s = time.monotonic()
        model(torch.ones(1))
        computed_s = time.monotonic()
        work.wait()
        waited_s = time.monotonic()
    return line, 1e3 * (waited_s - launched_s), 1e3 * (computed_s - computes_from_s), 1e3 * (waited_s - computed_s)


@pytest.mark.parametrize("times_late", [0.5, 2])
def test_exposed_time_is_the_time_that_computation_did_not_hide(world, tmp_path, times_late):
    per_rank = ranks.run(compute_while_a_rank_is_delayed, Delay(tmp_path), times_late * LATE_S)
    for rank, (line, from_launch_ms, computing_ms, waiting_ms) in enumerate(per_rank):
        assert line.communication_ms < from_launch_ms + SLACK_MS
        assert line.compute_ms == pytest.approx(computing_ms, abs=SLACK_MS)
        assert line.exposed_ms == pytest.approx(waiting_ms, abs=SLACK_MS)
        if rank == 0:
            assert line.communication_ms > 900 * LATE_S
    if times_late == 0.5:
        assert per_rank[0][0].exposed_ms > 400 * LATE_S


def call_while_a_rank_is_delayed(delay: Delay) -> Timeline:
    group, model = dist.new_group(), nn.Sequential(Sleeper(LATE_S / 2))
    dist.barrier()
    with timeline.record(model) as line:
        delay()
        dist.all_reduce(torch.ones(4), group=group)
        model(torch.ones(1))
    return line


def test_a_blocking_call_is_fully_exposed(world, tmp_path):
    per_rank = ranks.run(call_while_a_rank_is_delayed, Delay(tmp_path))
    assert per_rank[0].exposed_ms > 900 * LATE_S
    for line in per_rank:
        assert line.exposed_ms == pytest.approx(line.communication_ms, abs=1)


def block_inside_backward(delay: Delay) -> Timeline:
    """Run a blocking all-reduce in a gradient hook, which stops backward."""
    model, group = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dist.new_group()

    def reduce(parameter: nn.Parameter) -> None:
        delay()
        dist.all_reduce(parameter.grad, group=group)

    model[1].bias.register_post_accumulate_grad_hook(reduce)
    with timeline.record(model) as line:
        model(torch.ones(1, 4)).sum().backward()
    return line


def assert_waiting_is_not_computing(line: Timeline) -> None:
    """Check the timeline of a rank that mostly waited for a delayed one."""
    assert line.exposed_ms > 900 * LATE_S
    assert line.compute_ms < 1e3 * (line.ended_s - line.began_s) - 900 * LATE_S


def test_a_blocking_call_inside_backward_is_exposed(world, tmp_path):
    assert_waiting_is_not_computing(ranks.run(block_inside_backward, Delay(tmp_path))[0])


def functional_inside_a_unit(delay: Delay) -> Timeline:
    """Run a functional collective, as DTensor does, which is launched and waited for in forward."""
    import torch.distributed._functional_collectives as functional

    class Reducing(Sleeper):
        def forward(self, inputs):
            delay()
            return functional.all_reduce(inputs, "sum", dist.group.WORLD) * self.weight

    model = nn.Sequential(Reducing(0))
    dist.barrier()
    with timeline.record(model) as line:
        model(torch.ones(1))
    return line


def test_the_wait_for_a_functional_collective_is_exposed(ranks_end_with_the_module, tmp_path):
    ranks.start(2, detect_mismatch=False)
    assert_waiting_is_not_computing(ranks.run(functional_inside_a_unit, Delay(tmp_path))[0])


def ddp_with_a_delayed_rank(delay: Delay) -> Timeline:
    """Run DDP, which waits in C++ at the end of backward(). That wait is not computation."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    dist.barrier()
    with timeline.record(model) as line:
        loss = model(torch.ones(1, 4)).sum()
        delay()
        loss.backward()
    return line


def test_the_wait_of_ddp_is_exposed(ranks_end_with_the_module, tmp_path):
    ranks.start(2, detect_mismatch=False)  # mismatch detection would delay every rank before the collective
    assert_waiting_is_not_computing(ranks.run(ddp_with_a_delayed_rank, Delay(tmp_path))[0])


def profiled_all_reduces() -> list[list[tuple[float, float]]]:
    """Run four all-reduces, with an increasing delay on rank 1.

    Returns:
        The start and the duration of each in ms, by torch's profiler and by the timeline. Starts are relative to the
        first all-reduce, because the two clocks start at different times.
    """
    from torch.profiler import ProfilerActivity, profile

    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, timeline.record() as line:
        for number in range(4):
            if dist.get_rank() == 1:
                time.sleep(scaled(0.1) * (number + 1))
            dist.all_reduce(torch.ones(1000), group=group)
    events = [event.time_range for event in profiled.events() if event.name == "gloo:all_reduce"]
    theirs = sorted((each.start / 1e3, each.elapsed_us() / 1e3) for each in events)
    spans = [span for span in line.spans if span.lane == "communication"]
    ours = [(1e3 * span.began_s, 1e3 * (span.ended_s - span.began_s)) for span in spans]
    return [[(start - found[0][0], lasts) for start, lasts in found] for found in (theirs, ours)]


@pytest.mark.exhaustive
def test_spans_agree_with_torchs_profiler(world):
    """The tolerance of 20 ms is for threads that wait for a core. They may wait longer now and then, so the least
    disturbed of three attempts counts.
    """

    def largest_difference_ms(per_rank: list) -> float:
        pairs = [pair for theirs, ours in per_rank for pair in zip(theirs, ours, strict=True)]
        return max(abs(one - other) for pair in pairs for one, other in zip(*pair, strict=True))

    per_rank = min((ranks.run(profiled_all_reduces) for _ in range(3)), key=largest_difference_ms)
    assert largest_difference_ms(per_rank) < scaled(20)
    assert [len(ours) for _, ours in per_rank] == [4, 4]
    assert all(lasts > scaled(100) * index for index, (_, lasts) in enumerate(per_rank[0][1]))


# -- awkward uses


def test_nothing_recorded_is_an_empty_timeline():
    with timeline.record() as line:
        pass
    assert (line.spans, line.rank, line.exposed_ms, line.overlap) == ([], None, 0, 0.0)
    with pytest.raises(ValueError, match=r"nothing to draw\. Record a step"):
        plots.timeline([line])
    with pytest.raises(ValueError, match=r"nothing to draw"):
        plots.timeline([])


def test_module_without_units_is_one_unit():
    layer = nn.Linear(2, 2)
    with timeline.record(layer) as line:
        layer(torch.ones(1, 2)).sum().backward()
    assert [(span.lane, span.name) for span in line.spans] == [("forward", "model"), ("backward", "model")]


def test_forward_alone_and_two_micro_batches():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with timeline.record(model) as line, torch.no_grad():
        model(torch.ones(1, 2))
    assert [(span.lane, span.name) for span in line.spans] == [("forward", "0"), ("forward", "2")]
    with timeline.record(model) as line:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    lanes = [span.lane for span in line.spans]
    assert lanes == ["forward", "forward", "backward", "backward"] * 2


def test_an_error_in_the_step_is_raised_and_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="on purpose"), timeline.record(model):
        raise ValueError("on purpose")
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks and not model._forward_hooks


def test_wrong_arguments_are_rejected_in_one_sentence():
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module as its first argument, got Adam"):
        with timeline.record(torch.optim.Adam([nn.Parameter(torch.ones(1))])):
            pass
    with pytest.raises(ValueError, match="not being recorded"), timeline.span(Timeline(), "optimizer", "step"):
        pass


def test_recomputed_units_get_a_row_of_their_own():
    line = line_of(("backward", 0, 4), ("forward", 1, 2))
    assert [name for name, _ in timeline.rows_of(line)] == ["compute", "compute 2"]


def test_ten_thousand_spans_are_processed_quickly():
    spans = [("communication", 2 * k, 2 * k + 1) for k in range(10_000)]
    line = line_of(("backward", 0, 20_000), *spans, waits=[(2 * k + 0.5, 2 * k + 1) for k in range(10_000)])
    began_s = time.perf_counter()
    assert line.exposed_ms == pytest.approx(5_000_000)
    assert time.perf_counter() - began_s < scaled(5), "a sweep takes 0.1 s; comparing all pairs would take a minute"


def test_a_span_that_the_caller_adds():
    with timeline.record() as line, timeline.span(line, "optimizer", "sharded step"):
        time.sleep(0.02)
    assert [(span.lane, span.name) for span in line.spans] == [("optimizer", "sharded step")]
    assert line.compute_ms >= 20


def test_a_timeline_can_be_pickled():
    line = line_of(("forward", 0, 1))
    assert pickle.loads(pickle.dumps(line)) == line


# -- the figure and the file


def hand_made() -> list[Timeline]:
    spans = [("forward", 0, 1), ("backward", 1, 4), ("communication", 2, 5), ("communication", 3, 6), ("mine", 7, 8)]
    return [line_of(*spans, waits=[(4, 6)]), Timeline(1, line_of(*spans).spans, [], 0.0, 10.0)]


def test_the_figure_has_a_bar_per_span_and_shows_the_exposed_time():
    figure = plots.timeline(hand_made())
    (axes,) = figure.axes
    drawn = sum(len(collection.get_paths()) for collection in axes.collections)
    assert drawn == 10 + 1, "ten spans and one wait"
    hatched = [bars for bars in axes.collections if bars.get_hatch()]
    assert hatched, "without color, lanes differ by their hatches"
    assert all(tuple(bars.get_hatchcolor()[0]) != tuple(bars.get_facecolor()[0]) for bars in hatched), (
        "hatches must be visible"
    )
    assert [label.get_text() for label in axes.get_yticklabels() if label.get_text()] == ["rank 0", "rank 1"]
    assert "2000 ms exposed\n50% hidden" in [text.get_text() for text in axes.texts]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["forward", "backward", "communication", "mine", "waits"]


def test_a_name_stands_where_no_waiting_is_drawn_over_it():
    line = line_of(("backward", 0, 8), waits=[(2, 7)])
    (axes,) = plots.timeline([line], exposed=False).axes
    (name,) = [text for text in axes.texts if text.get_text() == line.spans[0].name]
    assert name.get_position()[0] == pytest.approx(1000), (
        "between 0 and 2 s, because only 1 s is left after the waiting"
    )


@pytest.mark.parametrize(
    ("op", "name"), [("send", "send to 3"), ("recv", "recv from 3"), ("all_reduce", "all_reduce 7")]
)
def test_a_span_names_the_other_rank_of_a_message(op, name):
    partner = None if op == "all_reduce" else 3
    entry = SimpleNamespace(op=op, partner=partner, launched_s=0.0, payload_bytes=4)
    assert timeline._span_of(7, entry, ended_s=1.0).name == name
