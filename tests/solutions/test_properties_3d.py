"""On every mesh of 1 to 8 ranks, a GPT trains as one process does, and each gradient counts once in the norm.

The functions without `test_` run on the ranks.
"""

import contextlib
import io
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared import ranks
from shared.deadlines import scaled
from shared.models import GPTConfig, TinyGPT, gpt_layers
from shared.planner.layouts import H100, Cluster, Job
from shared.planner.links import REAL_LINKS
from shared.planner.search import GB, TIE, search
from shared.planner.shapes import llama
from solutions import layouts
from solutions.parallel_3d import Parallel3D, make_mesh
from tests.drawn import seeds, tried

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("3d_parallelism")]

STEPS = 3
DEADLINE_S = scaled(60.0)  # eight ranks may share two cores
# AdamW turns a rounding of 1e-16 in a gradient into 1e-16 / eps. The factor of clipping has 1e-6 in it.
TOLERANCE, ADAMW = 1e-6, {"lr": 1e-2, "eps": 1e-3}
NORM_TOLERANCE = 1e-9  # before the first clipping
AXES = ("dp", "pp", "tp")


@pytest.fixture
def eight_ranks(ranks_end_with_the_module):
    """Eight ranks, which are those of the module's earlier tests if all of them are still alive."""
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(8, detect_mismatch=False)


# -- coordinates

sizes_of_meshes = st.dictionaries(st.sampled_from(["dp", "pp", "tp", "cp"]), st.integers(1, 5), min_size=1)
sizes_of_meshes = sizes_of_meshes.filter(lambda sizes: math.prod(sizes.values()) <= 120)


@tried(100)
@given(sizes_of_meshes)
def test_coordinates_count_the_ranks_and_groups_divide_them(sizes):
    world = range(math.prod(sizes.values()))
    places = [tuple(layouts.coordinates(rank, sizes).values()) for rank in world]
    assert places == sorted(places) and len(set(places)) == len(world)
    for axis, size in sizes.items():
        groups = {tuple(layouts.ranks_along(axis, rank, sizes)) for rank in world}
        assert sorted(rank for group in groups for rank in group) == list(world)
        assert all(len(group) == size and group == tuple(sorted(group)) for group in groups)


def mesh_of(sizes: dict[str, int]) -> list[list[int]]:
    mesh = make_mesh(**sizes)
    return [torch.distributed.get_process_group_ranks(mesh.get_group(axis)) for axis in sizes]


def all_sizes(world_size: int) -> list[dict[str, int]]:
    every = range(1, world_size + 1)
    triples = [(dp, pp, tp) for dp in every for pp in every for tp in every if dp * pp * tp == world_size]
    return [dict(zip(AXES, triple, strict=True)) for triple in triples]


@pytest.mark.parametrize("sizes", all_sizes(8), ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_the_mesh_has_the_groups_that_the_coordinates_say(eight_ranks, sizes):
    with ranks.world(8):
        for rank, groups in enumerate(ranks.run(mesh_of, sizes)):
            assert groups == [layouts.ranks_along(axis, rank, sizes) for axis in sizes]


# -- training


@dataclass(frozen=True)
class Drawn:
    """A GPT, and how it is trained on a mesh."""

    sizes: tuple[int, int, int]
    zero_stage: int
    schedule: str
    micro_batches: int
    samples: int
    more_layers: int
    head_width: int
    vocabulary: int
    tied: bool
    biases: bool
    frozen: str
    max_norm: float | None
    seed: int

    def model(self) -> TinyGPT:
        layers, heads = max(1, self.sizes[1] - 2) + self.more_layers, 8
        model = TinyGPT(GPTConfig(self.vocabulary, 6, layers, heads, heads * self.head_width), self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if not self.tied:
                model.output = nn.Linear(model.config.width, self.vocabulary, bias=self.biases)
            for block in model.blocks if self.biases else ():
                block.up = nn.Linear(block.up.in_features, block.up.out_features)
                block.down = nn.Linear(block.down.in_features, block.down.out_features)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.3)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (self.frozen and self.frozen in name))
        return model.double()

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, self.sizes[0] * self.micro_batches * self.samples, 5)
        return [tuple(torch.randint(self.vocabulary, shape, generator=generator)) for _ in range(STEPS)]


drawn = st.builds(
    Drawn,
    sizes=st.sampled_from([tuple(sizes.values()) for size in (1, 2, 4, 8) for sizes in all_sizes(size)]),
    zero_stage=st.integers(0, 1),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
    micro_batches=st.integers(1, 4),
    samples=st.integers(1, 2),
    more_layers=st.integers(0, 2),
    head_width=st.integers(1, 2),
    vocabulary=st.integers(5, 19),
    tied=st.booleans(),
    biases=st.booleans(),
    frozen=st.sampled_from(["", "", "norm", "position"]),
    max_norm=st.none() | st.sampled_from([0.05, 1000.0]),
    seed=seeds,
)


def on_the_mesh(drawn: Drawn) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train on this rank. Return losses and norms, and this rank's parameters."""
    how = {name: getattr(drawn, name) for name in ("schedule", "micro_batches", "zero_stage")}
    parallel = Parallel3D(drawn.model(), make_mesh(*drawn.sizes), torch.optim.AdamW, **how, **ADAMW)
    found = []
    for batch in drawn.batches():
        parallel.optimizer.zero_grad()
        loss = parallel.step(*batch)
        norm = parallel.clip_grad_norm_(drawn.max_norm) if drawn.max_norm else torch.zeros(())
        parallel.optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {name: parameter.detach() for name, parameter in parallel.stage_parameters().items()}


def in_one_process(drawn: Drawn) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    model = drawn.model()
    chain = gpt_layers(model)
    trained = [parameter for parameter in chain.parameters() if parameter.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, **ADAMW), []
    for batch in drawn.batches():
        optimizer.zero_grad()
        loss, norm = model(*batch), torch.zeros(())
        loss.backward()
        if drawn.max_norm:
            norm = nn.utils.clip_grad_norm_(trained, drawn.max_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {name: parameter.detach() for name, parameter in chain.named_parameters()}


def own_shard(drawn: Drawn, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tp rank's shard of a whole parameter, without padding."""
    tp = drawn.sizes[2]
    index = rank % tp
    if "token_embedding" in name or ".output." in name:
        rows = math.ceil(len(whole) / tp)
        return whole[index * rows : (index + 1) * rows]
    if "query_key_value" in name:
        return torch.cat([part.chunk(tp)[index] for part in whole.chunk(3)])
    if ".up." in name:
        return whole.chunk(tp)[index]
    return whole.chunk(tp, dim=1)[index] if name.endswith(("down.weight", "project.weight")) else whole


def assert_trains_as_one_process(drawn: Drawn) -> None:
    expected, parameters = in_one_process(drawn)
    with ranks.world(math.prod(drawn.sizes)):
        results = ranks.run(on_the_mesh, drawn, timeout_s=DEADLINE_S)
    for rank, (found, own) in enumerate(results):
        torch.testing.assert_close(found[0], expected[0], rtol=NORM_TOLERANCE, atol=NORM_TOLERANCE)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        for name, parameter in own.items():
            shard = own_shard(drawn, name, parameters[name], rank)
            torch.testing.assert_close(parameter[: len(shard)], shard, rtol=TOLERANCE, atol=TOLERANCE)


@tried(40)
@given(drawn)
def test_a_gpt_trains_on_a_mesh_as_in_one_process(eight_ranks, drawn):
    assert_trains_as_one_process(drawn)


PLAIN = Drawn((1, 1, 1), 0, "1f1b", 2, 1, 0, 1, 11, True, True, "", 0.05, 7)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("sizes", all_sizes(8), ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_every_mesh_of_eight_ranks_clips_as_one_process(eight_ranks, sizes, zero_stage):
    assert_trains_as_one_process(replace(PLAIN, sizes=tuple(sizes.values()), zero_stage=zero_stage))


# -- choosing


clusters = st.builds(
    Cluster,
    hosts=st.integers(1, 3),
    gpu=st.floats(1, 200).map(lambda gb: replace(H100, memory_bytes=gb * GB)),
    inside=st.just(REAL_LINKS[0]),
    adapter=st.sampled_from(REAL_LINKS[3:]),
    adapters=st.sampled_from([1, 8]),
    gpus_per_host=st.sampled_from([1, 2, 4]),
)


@tried(40)
@given(clusters, st.integers(1, 3), st.sampled_from([2, 6, 8]), st.integers(1, 24))
def test_chosen_layouts_are_those_of_the_search(cluster, layers, heads, sequences):
    job = Job(llama("drawn", 4 * layers, 256 * heads, heads, heads, 512 * heads, 32000, 1024), sequences)
    found = search(job, cluster)
    chosen = [found.candidate(layout) for layout in layouts.choose_layouts(job, cluster)]
    assert (not chosen) == (found.best is None)
    fastest_s = found.best.time.total_s if found.best else 0.0
    for each in chosen:
        assert each.fits and each.time.total_s <= (1 + TIE + 1e-3) * fastest_s
    assert {each.layout.sizes for each in chosen} >= {
        each.layout.sizes for each in found.by_sizes() if each.time.total_s <= (1 + TIE - 1e-3) * fastest_s
    }
