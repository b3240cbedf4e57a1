"""When units have memory: the record, its figure, and the merged messages of a timeline."""

from types import SimpleNamespace

import pytest
import torch

from shared import widgets
from shared.memory import lifetimes
from shared.plots import lifetimes as lifetime_plots
from shared.timeline import Span, Timeline
from shared.timeline.blocks import with_block_numbers, zero3_step
from shared.timeline.bundles import bundled


def unsharded_twice() -> lifetimes.Lifetimes:
    """Follow one unit through a forward and a backward, with memory for it in each."""
    flat, weight = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    storage = flat.untyped_storage()

    def resize(size: int) -> None:
        storage.resize_(size)

    def look() -> dict:
        return {"block": ("UNSHARDED" if storage.nbytes() else "SHARDED", storage.nbytes())}

    resize(0)
    with lifetimes.follow(look) as life:
        torch.zeros(1)
        resize(12)
        product = (weight * 2).sum()
        resize(0)
        product.register_hook(lambda _: resize(12))
        torch.zeros(1)
        product.backward()
        resize(0)
        torch.zeros(1)
    return life


def test_each_unshard_is_counted_and_each_operator_seen():
    life = unsharded_twice()
    assert life.unshards("block") == 2
    assert life.peak_bytes == 12
    assert life.total_bytes[0] == 0 and life.total_bytes[-1] == 0
    assert [span.nbytes for span in life.spans["block"]] == [0, 12, 0, 12, 0]
    assert life.spans["block"][-1].ended == life.operators == len(life.total_bytes)


def test_backward_is_distinguished_from_the_operators_around_it():
    life = unsharded_twice()
    began, ended = life.backward
    second = life.spans["block"][3]
    assert began <= second.began < second.ended <= ended < life.operators


def test_units_are_looked_at_by_their_flat_parameters():
    flat = SimpleNamespace(state="UNSHARDED", flat_param=torch.ones(3))
    look = lifetimes.states_of({"block 0": flat})
    assert look() == {"block 0": ("UNSHARDED", 12)}
    flat.state = "SHARDED"
    flat.flat_param.untyped_storage().resize_(0)
    assert look() == {"block 0": ("SHARDED", 0)}


def test_a_block_without_operators_is_empty():
    with lifetimes.follow(lambda: {}) as life:
        pass
    assert (life.operators, life.peak_bytes, life.backward) == (0, 0, None)


def test_the_figure_has_a_bar_wherever_a_unit_has_memory():
    life = unsharded_twice()
    figure = lifetime_plots.lifetimes({"run": life}, own_bytes=4, expected_bytes={"run": 16})
    above, below = figure.axes
    bars = [path.get_extents() for bar in below.collections for path in bar.get_paths()]
    seen = [(span.began, span.ended) for span in life.spans["block"] if span.nbytes]
    assert [(bar.x0, bar.x1) for bar in bars] == seen
    assert [label.get_text() for label in below.get_yticklabels()] == ["block"]
    texts = [text.get_text().strip() for text in above.texts]
    assert texts == ["formula: 0.00 MB", "forward", "backward", "after"]


def test_states_differ_without_color():
    fills = [(style["facecolor"], style.get("hatch")) for style in lifetime_plots._STYLES.values()]
    assert len(set(fills)) == len(fills)


def test_a_moment_names_the_state_of_each_unit():
    life = unsharded_twice()
    changes = lifetime_plots.moments(life)
    assert changes == [span.began for span in life.spans["block"]]
    for at, state in zip(changes, ["SHARDED", "UNSHARDED"] * 2, strict=False):
        above, below = lifetime_plots.moment(life, 4, 16, at).axes
        assert [text.get_text() for text in below.texts] == [state]
        assert above.get_title().startswith(f"operator {at}")


def test_the_stepper_returns_a_figure_of_all_steps(displayed, with_a_reader):
    life = unsharded_twice()
    figure = widgets.lifetime_stepper({"run": life, "again": life}, 4, {"run": 16, "again": 16}, of="again")
    assert [axes.get_title() for axes in figure.axes[:2]] == ["run", "again"]
    slider = displayed[0].children[0].children[1]
    assert slider.max == len(lifetime_plots.moments(life)) - 1


def test_a_figure_without_steps_is_rejected():
    with pytest.raises(ValueError, match="at least"):
        lifetime_plots.lifetimes({}, 0, {})


def test_messages_of_one_collective_become_one_span():
    def message(began_s: float, ended_s: float) -> Span:
        return Span("communication", "send", began_s, ended_s, payload_bytes=10)

    sent = [message(1.0, 3.0), message(1.1, 2.0), message(5.0, 6.0), message(5.1, 7.0)]
    line = Timeline(0, [*sent, Span("forward", "block", 3.0, 5.0)], waits=[(1.2, 3.0)], began_s=1.0, ended_s=8.0)
    short = bundled(line, messages=2)
    assert [(span.lane, span.began_s, span.ended_s, span.payload_bytes) for span in short.spans] == [
        ("communication", 0.0, 2.0, 20),
        ("forward", 2.0, 4.0, 0),
        ("communication", 4.0, 6.0, 20),
    ]
    assert (short.began_s, short.ended_s, short.rank) == (0.0, 7.0, 0)
    assert short.waits == [pytest.approx((0.2, 2.0))]
    assert line.spans[0].began_s == 1.0  # the original is as it was
    assert [span.name for span in short.spans] == ["1", "block", "2"]
    assert [span.name for span in bundled(line, 2, ["AG 0", "RS 0"]).spans] == ["AG 0", "block", "RS 0"]
    ends_s = [span.ended_s for span in bundled(line, 2, most_s=1.5).spans]
    assert ends_s == [1.5, 4.0, 5.5]  # a transfer ends when the link has sent it, computation as it was recorded
    with pytest.raises(ValueError, match="zip"):
        bundled(line, 2, ["AG 0"])


@pytest.mark.parametrize(
    ("prefetched", "all_gathers", "reduce_scatters"),
    [
        (False, {"root": 0, "0": 1, "1": 2, "2": 3, "2 again": 4, "1 again": 6, "0 again": 8}, [5, 7, 9, 10]),
        (True, {"root": 0, "0": 1, "1": 2, "2": 3, "2 again": 4, "1 again": 5, "0 again": 7}, [6, 8, 9, 10]),
    ],
)
def test_the_collectives_of_a_sharded_step_are_named_by_their_blocks(prefetched, all_gathers, reduce_scatters):
    began_s = [float(number) for number in range(11) for _ in range(2)]  # of a send and a receive for each collective
    messages = [Span("communication", "send to 1", began, began + 0.5) for began in began_s]
    line = Timeline(0, [*messages, Span("backward", "blocks.2", 4.5, 6.0)], began_s=0.0, ended_s=11.0)
    step = zero3_step(line, blocks=3, ranks=2, prefetched=prefetched)
    found = {lane: [(s.name, s.began_s) for s in step.spans if s.lane == lane] for lane in ("all-gather", "backward")}
    assert found["all-gather"] == [(name.split()[0], began) for name, began in all_gathers.items()]
    assert found["backward"] == [("2", 4.5)]
    scattered = [(span.name, span.began_s) for span in step.spans if span.lane == "reduce-scatter"]
    assert scattered == list(zip(("2", "1", "0", "root"), reduce_scatters, strict=True))
    assert step.communication_ms == line.communication_ms and step.exposed_ms == line.exposed_ms
    with pytest.raises(ValueError, match="zip"):
        zero3_step(line, blocks=4, ranks=2, prefetched=prefetched)


def test_only_the_names_of_blocks_become_numbers():
    line = Timeline(0, [Span("forward", "blocks.10", 0.0, 1.0), Span("forward", "norm", 1.0, 2.0)])
    assert [span.name for span in with_block_numbers(line).spans] == ["10", "norm"]
