"""The script that shows gradient synchronization (its counts, its figure, its errors), and the widget of lesson 03."""

import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest

from shared import formulas, plots, widgets
from shared.plots import buckets as bucket_plots
from shared.plots import sync as sync_plots

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "labs" / "gradient_sync_visualizer.py"
SIZES = {"embedding.weight": 4000, "blocks.0.up.weight": 2000, "blocks.0.norm.bias": 10, "blocks.1.up.weight": 2000}
NAMES = list(SIZES)


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def _torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    return _run(*launcher, str(SCRIPT), *arguments)


# -- the script


@pytest.fixture(scope="module")
def script_output(tmp_path_factory) -> tuple[str, Path]:
    """Run the script on two ranks. Returns its output and the path of its figure."""
    figure = tmp_path_factory.mktemp("figure") / "sync.png"
    done = _torchrun(2, "--layers", "1", "--rounds", "1", "--bucket-cap-mb", "0.1", "--out", str(figure))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, figure


def test_gradients_differ_before_and_are_the_same_on_all_ranks_after(script_output):
    rows = re.findall(r"^(\S+\.(?:weight|bias)) +([\d,]+) +(\d+) +(\S+) +(\S+)$", script_output[0], re.MULTILINE)
    assert len(rows) == 12  # 4 around one block of 8
    for name, _, _, before, after in rows:
        assert float(before) > 0 == float(after), name


def test_buckets_follow_the_reverse_order_and_keep_to_the_cap(script_output):
    rows = re.findall(r"^(\S+\.(?:weight|bias)) +([\d,]+) +(\d+) ", script_output[0], re.MULTILINE)
    numbers = [int(number) for _, _, number in rows]
    assert numbers == sorted(numbers, reverse=True) and numbers[-1] == 1
    for bucket in set(numbers):
        sizes_bytes = [int(size.replace(",", "")) for _, size, number in rows if int(number) == bucket]
        assert sum(sizes_bytes) <= 0.1 * 2**20 or len(sizes_bytes) == 1


def test_three_methods_send_the_same_bytes_in_fewer_all_reduces(script_output):
    parameters = re.findall(r"^\S+\.(?:weight|bias) +([\d,]+) +(\d+) ", script_output[0], re.MULTILINE)
    gradients_bytes = sum(int(size.replace(",", "")) for size, _ in parameters)
    methods = re.findall(r"^(per parameter|bucketed|flat) +(\d+) +([\d,]+) +[\d.]+$", script_output[0], re.MULTILINE)
    assert [(name, int(messages)) for name, messages, _ in methods] == [
        ("per parameter", len(parameters)),
        ("bucketed", len({number for _, number in parameters})),
        ("flat", 1),
    ]
    sent_bytes = formulas.all_reduce_sent_bytes(gradients_bytes, ranks=2)
    assert {int(sent.replace(",", "")) for _, _, sent in methods} == {round(sent_bytes)}


def test_it_draws_a_figure_that_is_not_blank(script_output):
    image = matplotlib.image.imread(script_output[1])
    height, width, _ = image.shape
    assert width > 800 and height > 500
    assert image[..., :3].std() > 0.05


@pytest.mark.exhaustive
def test_without_torchrun_it_says_how_to_start_it():
    done = _run(str(SCRIPT))
    assert done.returncode == 2
    assert "torchrun --nproc_per_node=2" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--bucket-cap-mb", "0"), "--bucket-cap-mb must be above 0, got 0.0"),
        (("--bucket-cap-mb", "nan"), "--bucket-cap-mb must be above 0, got nan"),
        (("--layers", "0"), "--layers and --rounds must be at least 1, got 0 and 20"),
        (("--out", "figure.txt"), "--out must end in .png, got figure.txt"),
        (("--out", "nowhere/figure.png"), "--out must be in a folder that exists, got nowhere/figure.png"),
    ],
)
def test_bad_arguments_are_rejected_in_one_sentence(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    parse_arguments = runpy.run_path(str(SCRIPT), run_name="visualizer")["parse_arguments"]
    for rank, last_line in (("0", f"error: {sentence}\n"), ("1", "")):  # only rank 0 prints the message
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            parse_arguments()
        printed = capsys.readouterr().err
        assert printed.endswith(last_line) and bool(printed) == bool(last_line)


# -- the figures


def map_of(sizes_bytes: dict[str, int], buckets: list[list[str]]):
    """Draw a bucket map. Returns its axes."""
    figure, axes = plots.new_axes(7.0, 2.0)
    bucket_plots.draw_map(axes, sizes_bytes, buckets)
    plots.finish(figure)
    return axes


def numbers_on(axes) -> list[tuple[int, str]]:
    """Return (row, bucket number) for each number on a bucket map."""
    return sorted((round(text.get_position()[1]), text.get_text()) for text in axes.texts)


def test_a_map_has_a_row_per_unit_and_numbers_its_buckets():
    axes = map_of(SIZES, [NAMES[:1:-1], NAMES[1::-1]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["embedding", "blocks.0", "blocks.1"]
    assert numbers_on(axes) == [(0, "2"), (1, "2"), (2, "1")]


def test_a_frozen_parameter_is_in_no_bucket():
    axes = map_of(SIZES, [NAMES[1:]])
    assert numbers_on(axes) == [(1, "1"), (2, "1")]


def test_later_buckets_are_lighter():
    buckets = [[f"blocks.{number}.weight"] for number in range(12)]
    axes = map_of({name: 100 for [name] in buckets}, buckets)
    sums = [sum(bars.get_facecolor()[0][:3]) for bars in axes.collections]
    assert len(sums) == 12 and all(later - earlier > 0.05 for earlier, later in pairwise(sums))


RUNS = [
    bucket_plots.CapRun("none", [[name] for name in NAMES[::-1]], [(0, 2), (2, 3), (3, 5), (5, 8)], 7.0),
    bucket_plots.CapRun("25 MiB", [NAMES[::-1]], [(0, 3)], 2.5),
]


def test_all_caps_are_drawn_with_their_all_reduces_and_times():
    left, right = bucket_plots.cap_runs(SIZES, RUNS).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["none", "25 MiB"]
    assert [text.get_text() for text in right.texts] == ["4 all-reduces, 8 ms", "1 all-reduce, 3 ms"]
    assert [bar.get_width() for bar in right.patches] == [8, 3]
    assert [line.get_xdata()[0] for line in right.lines] == [7.0, 2.5]


def test_one_cap_is_drawn_on_the_time_axis_of_all():
    for index, title in enumerate(("cap none: 4 all-reduces, 8.0 ms", "cap 25 MiB: 1 all-reduce, 3.0 ms")):
        above, below = bucket_plots.cap_run(SIZES, RUNS, index).axes
        assert above.get_title().startswith(title)
        assert below.get_xlim()[0] == 0 and below.get_xlim()[1] >= 8


def test_the_figure_of_the_script_shows_the_cost_of_each_method():
    gradients = [{name: [0.0, rank - 0.5] for name in SIZES} for rank in range(2)]
    costs = {"per parameter": sync_plots.Cost(4, 100.0, 9.0), "flat": sync_plots.Cost(1, 100.0, 1.5)}
    figure = sync_plots.gradient_sync(gradients, gradients, SIZES, [NAMES], costs)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:2] == ["gradients, before", "gradients, after"]
    assert {"4", "1", "9", "1.5"} <= {text.get_text() for axes in figure.axes for text in axes.texts}


# -- the widget


def test_without_jupyterlab_only_the_static_figure_is_shown(displayed):
    figure = widgets.cap_chooser(SIZES, RUNS)
    assert displayed == []
    assert widgets.as_png(figure) == widgets.as_png(bucket_plots.cap_runs(SIZES, RUNS))


def test_the_slider_chooses_a_cap(displayed, with_a_reader):
    widgets.cap_chooser(SIZES, RUNS)
    [box] = displayed
    (_, slider), picture = box.children[0].children, box.children[1]
    assert (slider.min, slider.max, slider.description) == (0, 1, "cap")
    slider.value = 1
    assert picture.value == widgets.as_png(bucket_plots.cap_run(SIZES, RUNS, 1))
