"""The diagrams of chapters 06 to 13 say what the solutions do: owners, states, times and names of folders."""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.testing._internal.distributed.fake_pg import FakeStore

from shared import formulas
from shared.plots import diagrams
from shared.plots.diagrams import checkpoints, fsdp, memory, sharding, tensor, units
from solutions.checkpoints import newest_checkpoint
from solutions.flat import FlatLayout
from solutions.prefetching import Prefetcher

WORLD_SIZES = (2, 3, 4)


def words_in(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


# -- chapter 06


def test_the_memory_of_a_step_has_the_bytes_of_adam_in_fp32():
    optimizer = next(moment for moment in memory.moments() if moment.phase == "optimizer")
    of_adam, each = formulas.FP32_ADAM, optimizer.held_gb
    assert each["gradients"] / each["parameters"] == of_adam.gradient / of_adam.parameter
    assert each["optimizer"] / each["parameters"] == of_adam.optimizer / of_adam.parameter
    assert each["activations"] == 0


def test_activations_peak_when_backward_begins_and_gradients_stay_until_the_next_step():
    moments = memory.moments()
    peak = max(moments, key=lambda moment: moment.total_gb)
    assert peak is next(moment for moment in moments if moment.phase == "backward")
    activations = [moment.held_gb["activations"] for moment in moments]
    assert all(later >= earlier for earlier, later in pairwise(activations[: moments.index(peak) + 1]))
    assert all(later < earlier for earlier, later in pairwise(activations[moments.index(peak) : -1]))
    assert moments[-1].held_gb["gradients"] == 0 and moments[-2].held_gb["gradients"] > 0
    assert f"peak: {peak.total_gb:g} GB" in words_in(diagrams.training_memory())


# -- chapter 07


def test_only_the_means_of_other_ranks_shards_are_undefined():
    assert words_in(diagrams.zero1_step()).count("?") == 4 * 3


# -- chapter 08


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_bucket_is_freed_when_the_next_one_is_launched(world_size):
    lives = sharding.lives_of(world_size)
    for life, following in pairwise(lives):
        assert life.freed_ms == following.launched_ms >= life.completed_ms
    assert lives[-1].freed_ms == lives[-1].completed_ms
    for moment_ms in range(int(lives[-1].freed_ms)):
        assert sum(life.allocated_ms <= moment_ms < life.freed_ms for life in lives) <= 2


# -- chapter 09


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_unit_is_sharded_as_by_the_flat_layout(world_size, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world_size)
    shapes = units.SHAPES.values()
    layout = FlatLayout([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    flat = layout.new_flat().fill_(-1)
    start = 0
    for view in layout.views(flat):
        view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
        start += view.numel()
    for rank, shard in enumerate(units.shards_of(world_size)):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        assert layout.shard_of(flat).tolist() == [-1 if element is None else element for element in shard]


def test_padding_is_named():
    assert "padding" in words_in(diagrams.unit())


class RecordedUnit:
    """A unit without parameters that records when it is unsharded."""

    def __init__(self, number: int, log: list[int]):
        self.number, self.log, self.sharded = number, log, True

    def unshard(self) -> None:
        if self.sharded:
            self.log.append(self.number)
        self.sharded = False


def test_all_gathers_are_launched_in_the_order_of_the_prefetcher():
    log: list[int] = []
    prefetcher, recorded = Prefetcher(1), [RecordedUnit(number, log) for number in range(3)]
    for _ in range(2):
        prefetcher.begin_forward()
        log.clear()
        for unit in recorded:
            unit.unshard()
            prefetcher.in_forward(unit)
            unit.sharded = True
    for unit in reversed(recorded):
        unit.unshard()
        prefetcher.in_backward(unit)
        unit.sharded = True
    assert [span.unit for span in units.UnitsRun().all_gathers] == log


def test_a_unit_computes_while_it_is_unsharded_and_at_most_two_have_memory():
    run = units.UnitsRun()
    for span in run.computed:
        if span.name != "waits":
            unsharded = [state for state in run.states if state.unit == span.unit and state.name == "UNSHARDED"]
            assert any(state.began_ms == span.began_ms and state.ended_ms == span.ended_ms for state in unsharded)
    with_memory = [state for state in run.states if state.name != "SHARDED"]
    for moment_ms in range(int(run.now_ms)):
        assert sum(state.began_ms <= moment_ms < state.ended_ms for state in with_memory) <= 2


def test_the_states_of_a_unit_follow_each_other_without_gaps():
    run = units.UnitsRun()
    follows = {"SHARDED": "UNSHARDING", "UNSHARDING": "UNSHARDED", "UNSHARDED": "SHARDED"}
    for number in range(3):
        states = [state for state in run.states if state.unit == number]
        assert states[0].began_ms == 0 and states[-1].ended_ms == run.now_ms
        for state, following in pairwise(states):
            at_once = (state.name, following.name) == ("UNSHARDED", "UNSHARDING")  # resharded for no time
            assert state.ended_ms == following.began_ms and (at_once or following.name == follows[state.name])


def test_prefetching_hides_every_all_gather_but_the_first_of_forward_and_of_backward():
    run = units.UnitsRun()
    waits = [span for span in run.computed if span.name == "waits"]
    assert [span.unit for span in waits] == [0, 2, 0]  # the last one is for the last reduce-scatter
    assert waits[-1].ended_ms == run.reduce_scatters[-1].ended_ms


# -- chapters 10 to 12


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_are_cut_by_rows_as_by_torch_and_slots_are_equally_long(world_size):
    parameters = [torch.arange(12).view(6, 2), torch.arange(12, 18)]
    for rank, slot in enumerate(fsdp.slots(world_size)):
        chunks = [parameter.chunk(world_size) for parameter in parameters]
        own = [element for chunk in chunks if rank < len(chunk) for element in chunk[rank].flatten().tolist()]
        assert [element for element in slot if element is not None] == own
        assert len(slot) == sum(chunk[0].numel() for chunk in chunks)
    assert fsdp.row_counts(6, 4) == [2, 2, 2, 0]
    flat = [element for shard in fsdp.flat_shards(world_size) for element in shard if element is not None]
    assert flat == list(range(18))


def test_streams_overlap_only_across_streams_and_a_collective_only_with_other_work():
    run = fsdp.StreamsRun()
    for stream in fsdp.STREAMS:
        tasks = [task for task in run.tasks if task.stream == stream]
        assert all(task.ended_ms <= following.began_ms for task, following in pairwise(tasks))
    collectives = [task for task in run.tasks if task.stream in ("all-gather", "reduce-scatter")]
    assert all(task.ended_ms <= following.began_ms for task, following in pairwise(collectives))
    for task in run.tasks:
        if task.name in ("forward", "backward"):
            gathered = [each for each in collectives if each.unit == task.unit and each.name == "all-gather"]
            assert gathered[task.name == "backward"].ended_ms <= task.began_ms


def test_blocking_calls_run_one_after_the_other_and_take_longer():
    blocking = fsdp.StreamsRun(blocking=True)
    assert all(task.ended_ms == following.began_ms for task, following in pairwise(blocking.tasks))
    assert blocking.ended_ms > fsdp.StreamsRun().ended_ms


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_hooks_run_in_the_order_of_fsdp2(fake_group, monkeypatch):
    seen = []

    def note(cls, name: str, hook: str) -> None:
        original = getattr(cls, name)

        def noted(self, *args, **options):
            seen.append((hook, self))
            return original(self, *args, **options)

        monkeypatch.setattr(cls, name, noted)

    *of_units, callback = fsdp.HOOKS
    for name in of_units:
        note(FSDPParamGroup, name, name)
    note(FSDPState, "_root_post_backward_final_callback", callback)
    tokens, mesh = torch.zeros(2, dtype=torch.long), init_device_mesh("cpu", (2,))
    # The root computes after the blocks, so its output is another tensor than theirs.
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    for each in (model[1], model[2], model):
        fully_shard(each, mesh=mesh)
    model(tokens).sum().backward()

    names = {model[number]._get_fsdp_state()._fsdp_param_group: f"block {number - 1}" for number in (1, 2)}
    *found, last = [fsdp.HookCall(hook, names.get(each, "root")) for hook, each in seen]
    assert found == fsdp.hook_calls(blocks=2)
    assert last == fsdp.HookCall("post_backward", "root")  # which the callback calls


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_deferred_initialization_holds_the_shards_and_one_parameter_at_its_peak(world_size):
    *deferred, whole = [stage.gb(world_size) for stage in memory.STAGES]
    assert whole == 48 and max(deferred) == pytest.approx(whole / world_size + 12) and deferred[1] < max(deferred)


def test_the_diagram_of_deferred_initialization_says_what_a_rank_holds():
    words = words_in(diagrams.deferred_init())
    assert [words.count(f"holds {held:g} GB") for held in (0, 48 / 4 + 12, 48)] == [1, 2, 1]


def test_the_mesh_has_two_copies_of_each_shard():
    words = words_in(diagrams.hybrid_mesh())
    assert words.count("shard 0") == words.count("shard 1") == words.count("reduce-scatter of gradients") == 2


def test_the_groups_of_the_mesh_with_three_axes_are_those_of_its_ranks():
    ranks = torch.arange(8).view(2, 2, 2)
    words = words_in(diagrams.mesh_3d())
    for dim in range(3):
        groups = ranks.movedim(dim, -1).reshape(-1, 2).tolist()
        assert " | ".join(f"{first} {second}" for first, second in groups) in words


@pytest.mark.parametrize("killed_ms", [0.0, 56.0, 79.0, 85.0, 90.0, 110.0])
def test_a_run_resumes_from_what_newest_checkpoint_finds(killed_ms, tmp_path):
    folders = checkpoints.left_by_a_kill(killed_ms)
    for folder in folders:
        (tmp_path / folder.name).mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / checkpoints.newest(folders)


def test_a_checkpoint_with_its_final_name_has_every_shard_and_metadata():
    for killed_ms in range(120):
        folders = {folder.name: folder for folder in checkpoints.left_by_a_kill(killed_ms)}
        resumed = folders[checkpoints.newest(list(folders.values()))]
        assert resumed.ranks == (0, 1, 2, 3) and resumed.metadata


def test_a_kill_while_a_rank_writes_leaves_a_partial_shard():
    _, unfinished = checkpoints.left_by_a_kill(56.0)
    assert (unfinished.ranks, unfinished.partial, unfinished.metadata) == ((0, 1, 2), (3,), False)
    assert words_in(diagrams.atomic_save()).count("Shard 3 is incomplete.") == 1


def test_a_checkpoint_gets_its_name_after_it_is_written_and_in_the_background_training_is_blocked_for_less():
    waiting, background = (checkpoints.SavingRun(in_background) for in_background in (False, True))
    (written,) = background.thread
    assert written.ended_ms <= next(span.began_ms for span in background.main if span.name == "renames")
    step_12 = next(span for span in background.main if span.name == "step 12")
    assert written.began_ms < step_12.began_ms < written.ended_ms
    assert background.blocked_ms < waiting.blocked_ms
    assert background.copied_ms[0] <= written.began_ms and background.copied_ms[1] == written.ended_ms
    for run in (waiting, background):
        assert all(earlier.ended_ms == later.began_ms for earlier, later in pairwise(run.main))
        parts = " + ".join(
            f"{span.ended_ms - span.began_ms:.0f}" for span in run.main if not span.name.startswith("step")
        )
        assert f"blocked for {parts} = {run.blocked_ms:.0f} ms" in words_in(diagrams.background_save())


# -- chapter 13


def test_both_ways_to_split_a_matrix_give_the_product():
    everything = range(len(tensor.INPUT))
    expected = (torch.tensor(tensor.INPUT) @ torch.tensor(tensor.MATRIX)).tolist()
    elements = [tensor.product(everything, tensor.own(rank)) for rank in range(tensor.RANKS)]
    assert [element for of_rank in elements for element in of_rank] == expected
    terms = [tensor.product(tensor.own(rank), everything) for rank in range(tensor.RANKS)]
    assert [sum(of_rank) for of_rank in zip(*terms, strict=True)] == expected
    words = words_in(diagrams.split_matrix())
    assert all(words.count(f"{element}") >= 2 for element in expected)


def test_the_terms_of_a_split_loss_add_up_to_the_cross_entropy():
    largest, sums, targets = zip(*tensor.loss_terms(), strict=True)
    logits = torch.tensor(tensor.LOGITS, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tensor.TARGET)).item()
    assert max(largest) == max(tensor.LOGITS)
    assert math.log(sum(sums)) - sum(targets) == pytest.approx(expected)
    assert any(f"= {expected:.2f}" in words for words in words_in(diagrams.split_loss()))


def test_sequence_parallelism_divides_the_tokens_of_norms_and_of_nothing_else():
    for split in (False, True):
        inside, outside = ([tensor.tokens_of(rank, inside, split) for rank in range(2)] for inside in (True, False))
        assert inside == [(0, 1, 2, 3)] * 2
        assert outside == ([(0, 1), (2, 3)] if split else inside)
    words = words_in(diagrams.sequence_parallel())
    assert [words.count(name) for name in ("all-\nreduce", "all-\ngather", "reduce-\nscatter")] == [2, 2, 2]
