# ---
# jupyter:
#   course:
#     module: parallel_3d
#     minutes: 95
# ---

# %% [markdown]
# # Lab 18 · 3D parallelism
#
# **95 minutes, 17 points.** In this lab, you arrange ranks in a mesh of dp × pp × tp, and train a GPT on it. Nothing is
# new on any single axis: you combine your tensor parallelism (lab 13), your pipeline (lab 15), your `OverlappedDDP`
# (lab 04) and your `ZeRO1` (lab 07). At the end, `Parallel3D` trains exactly as one process does, and you compute which
# layouts a large model can use on a given cluster.
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | 18.1 | `coordinates` and `ranks_along`: where a rank is in the mesh, and with whom it works | 9 | 2 |
# | 18.2 | `make_mesh`: torch's `DeviceMesh`, with its process groups | 6 | 1 |
# | 18.3 | `step_bytes` and `leaving_bytes`: which axis sends how much, and what leaves a host | 16 | 3 |
# | 18.4 | `split_model`: tensor parallelism inside a pipeline | 9 | 2 |
# | 18.5 | `Parallel3D.step`: data parallelism around both | 13 | 3 |
# | 18.6 | `Parallel3D.clip_grad_norm_`: a norm over three axes | 14 | 3 |
# | 18.7 | `bubble_s` and `choose_layouts`: the layouts that fit and are the fastest | 17 | 3 |
# | | Break it: four mistakes that raise no error | 11 | |
#
# Each exercise has a check. The checks of `Parallel3D` begin with plain layouts of two ranks, and then try every mesh
# of one, two and four ranks. They compare losses, gradients and norms with those of one process, in float64, and count
# the bytes that a rank sends along each axis.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import parallel_3d as check

ranks.start(world_size=4)

# %% tags=["export"] module="layouts"
# %%ranks
"""Layouts of ranks in a mesh: coordinates, the bytes that each axis sends, and the choice of a layout for a cluster.

`sizes` holds the number of ranks along each axis, from the outermost axis to the innermost one, such as
{"dp": 2, "pp": 4, "tp": 8}. Neighboring ranks differ in the innermost coordinate.
"""

import math
from collections.abc import Sequence

from shared import formulas
from shared.planner.layouts import Cluster, Job, TrainingLayout, memory, step_time
from shared.planner.search import TIE, USABLE, possible
from shared.planner.shapes import ModelShape

# %% [markdown]
# ## Exercise 18.1 · Coordinates (9 min, 2 points)
#
# In a mesh, a rank has one coordinate per axis. With dp = 2, pp = 2 and tp = 2, and tp innermost, the eight ranks are:
#
# | rank | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | dp | 0 | 0 | 0 | 0 | 1 | 1 | 1 | 1 |
# | pp | 0 | 0 | 1 | 1 | 0 | 0 | 1 | 1 |
# | tp | 0 | 1 | 0 | 1 | 0 | 1 | 0 | 1 |
#
# The coordinates count up like digits: the innermost axis is the last digit, which changes fastest. `sizes` is a
# dictionary with the number of ranks along each axis. Its first axis is the outermost one, and its last axis the
# innermost.
#
# - `coordinates(rank, sizes)` returns a dictionary with the rank's coordinate on each axis, in the order of `sizes`.
# - `ranks_along(axis, rank, sizes)` returns the ranks that differ from this rank only in the coordinate on `axis`, and
#   the rank itself, in increasing order. They form one process group. In the table, rank 5 is in the groups [1, 5]
#   along dp, [5, 7] along pp, and [4, 5] along tp.
# - There may be any number of axes, in any order and with any names.
#
# The first check tries the table. The second one draws meshes of up to 64 ranks.
#
# <details><summary>Hint 1</summary>
#
# `divmod(rank, size)` separates the last digit from the others. Which axis do you begin with?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A rank belongs to the group if its coordinates on all *other* axes are those of `rank`. How many ranks are there?
#
# </details>


# %% tags=["exercise", "export"] grade_id="coordinates" module="layouts"
# %%ranks
def coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Return a rank's coordinate on each axis of a mesh."""
    ### BEGIN SOLUTION
    found = {}
    for axis, size in reversed(sizes.items()):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in sizes}
    ### END SOLUTION


# %% tags=["check"] grade_id="check-coordinates" points=1
check.coordinates()


# %% tags=["exercise", "export"] grade_id="ranks_along" module="layouts"
# %%ranks
def ranks_along(axis: str, rank: int, sizes: dict[str, int]) -> list[int]:
    """Return the ranks of the process group that a rank belongs to along an axis, in increasing order."""

    ### BEGIN SOLUTION
    def others(each: int) -> dict[str, int]:
        return coordinates(each, sizes) | {axis: 0}

    world_size = math.prod(sizes.values())
    return [each for each in range(world_size) if others(each) == others(rank)]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ranks_along" points=1
check.ranks_along()

# %% [markdown]
# ## Exercise 18.2 · The mesh (6 min, 1 point)
#
# torch's `DeviceMesh` does this arithmetic, and forms the process groups: `mesh.get_group("tp")` is the group of this
# rank along tp. It does not compare the size of the mesh with the number of ranks, though. With 8 ranks and a mesh of 2
# × 2, torch 2.13 leaves out ranks 4 to 7 without an error.
#
# - `make_mesh(dp, pp, tp)` returns a `DeviceMesh` with the axes "dp", "pp" and "tp", of which tp is the innermost.
# - If dp · pp · tp is not the number of ranks, raise a `ValueError` whose message names all four numbers.
# - The device type is "cuda" if `torch.cuda.is_initialized()`, else "cpu".
#
# <details><summary>Hint</summary>
#
# `init_device_mesh(device_type, shape, mesh_dim_names=…)` counts the ranks row by row, so that the last dimension
# changes fastest.
#
# </details>


# %% tags=["export"]
# %%ranks
"""3D parallelism: a GPT on a mesh of dp × pp × tp ranks.

    dp   data parallelism: each replica of the model trains on its part of the batch (chapters 04 and 07)
    pp   pipeline parallelism: each stage has some of the layers (chapter 15)
    tp   tensor parallelism: each rank has a shard of every matrix of its stage (chapter 13)

The ranks that differ only in one coordinate form a process group along that axis.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.models import TinyGPT, gpt_layers
from shared.sharded.layers import expect_equally_ignored
from solutions.flat import FlatParameter
from solutions.overlapped_ddp import OverlappedDDP
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize, sharded_names
from solutions.vocabulary import vocab_parallel_cross_entropy
from solutions.zero1 import ZeRO1


# %% tags=["exercise", "export"] grade_id="make-mesh"
# %%ranks
def make_mesh(dp: int, pp: int, tp: int) -> DeviceMesh:
    """Arrange all ranks in a mesh with the axes "dp", "pp" and "tp". Neighboring ranks differ along tp.

    Communication: forms one process group per axis.
    Raises:
        ValueError: if dp · pp · tp is not the number of ranks.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size()
    if dp * pp * tp != world_size:
        raise ValueError(
            f"a mesh of dp={dp} × pp={pp} × tp={tp} needs {dp * pp * tp} ranks, "
            f"but there are {world_size}"
        )
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    ### END SOLUTION


# %% tags=["check"] grade_id="check-make-mesh" points=1
check.make_mesh()

# %% [markdown]
# ## Exercise 18.3 · Which axis crosses hosts? (16 min, 3 points)
#
# The ranks of a host are consecutive. Inside a host, GPUs are connected by a fast link. Between hosts, the link is
# often ten times slower, and the GPUs of a host share it. So the order of the axes decides which traffic takes the slow
# link.
#
# First, how much does a rank send in one step? `step_bytes(shape, sizes, sequences)` returns a dictionary with one
# entry per axis of `sizes`: the bytes for one destination. `shape` is a `ModelShape` of the planner, and `sequences`
# the number of sequences in the global batch, each of `shape.context` tokens. Every element has 2 bytes. You may assume
# that there are at least two stages. Each has `shape.layers / pp` layers.
#
# - `"tp"`: `formulas.tensor_parallel_sent_bytes(tokens, hidden, layers, ranks)`, for the layers of this stage and the
#   tokens of this replica. Each of the dp replicas gets an equal part of the sequences.
# - `"pp"`: the stage's outputs, which go to the *next* stage. There is one vector of `shape.hidden` elements for each
#   token of this replica. Each tp rank sends all of these outputs, because all tp ranks have the same ones. The
#   gradients for the *previous* stage have the same size, but the entry is the bytes for *one* destination, so leave
#   them out.
# - `"dp"`: `formulas.all_reduce_sent_bytes(buffer_bytes, ranks)`, for the gradients. Assume that the rank has
#   `shape.parameters / (pp · tp)` parameters.
#
# For example, take 4 sequences of 8 tokens, a width of 16, 2 layers, 1,000 parameters, and dp = pp = tp = 2. A replica
# has 16 tokens, and a stage has one layer. So `step_bytes` returns 500 for dp, 512 for pp and 2,048 for tp.
#
# Then, who gets these bytes? `destinations(axis, rank, sizes)` is given. Along tp and dp, it returns the next rank of
# the ring, and along pp the previous and the next stage, where they exist.
#
# `leaving_bytes(shape, sizes, sequences, ranks_per_host, host)` returns a dictionary with one entry per axis: the bytes
# that leave this host in one step.
#
# - Add up `step_bytes` over the ranks of the host, once for each destination that is on another host. The ranks of host
#   h are h · ranks_per_host to (h + 1) · ranks_per_host − 1. In the example, with 4 ranks per host and dp outermost,
#   only dp leaves host 0: 4 · 500 bytes. With pp outermost, only pp does: 4 · 512 bytes.
#
# The first check compares `step_bytes` on small meshes. The second check compares `leaving_bytes`, with the axes in any
# order.
#
# <details><summary>Hint 1</summary>
#
# How many tokens does one replica process? All three formulas begin with what one rank has: some tokens, some layers,
# some parameters.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The host of a rank is `rank // ranks_per_host`. For which destinations is it another one?
#
# </details>


# %% tags=["export"] module="layouts"
# %%ranks
def destinations(axis: str, rank: int, sizes: dict[str, int]) -> list[int]:
    """Return to whom a rank sends along an axis: its neighboring stages, or the next rank of a ring."""
    group = ranks_along(axis, rank, sizes)
    index = group.index(rank)
    if axis == "pp":
        return group[max(index - 1, 0) : index] + group[index + 1 : index + 2]
    return [group[(index + 1) % len(group)]] if len(group) > 1 else []


# %% tags=["exercise", "export"] grade_id="step-bytes" module="layouts"
# %%ranks
def step_bytes(shape: ModelShape, sizes: dict[str, int], sequences: int) -> dict[str, float]:
    """Estimate what a rank of a middle stage sends in a step along each axis, to each destination."""
    ### BEGIN SOLUTION
    dp, pp, tp = sizes["dp"], sizes["pp"], sizes["tp"]
    tokens, layers = sequences * shape.context / dp, shape.layers / pp
    found = {
        "dp": formulas.all_reduce_sent_bytes(2 * shape.parameters / (pp * tp), dp),
        "pp": 2.0 * tokens * shape.hidden,
        "tp": formulas.tensor_parallel_sent_bytes(tokens, shape.hidden, layers, tp),
    }
    return {axis: found[axis] for axis in sizes}
    ### END SOLUTION


# %% tags=["check"] grade_id="check-step-bytes" points=1
check.step_bytes()


# %% tags=["exercise", "export"] grade_id="leaving-bytes" module="layouts"
# %%ranks
def leaving_bytes(
    shape: ModelShape, sizes: dict[str, int], sequences: int, ranks_per_host: int, host: int = 0
) -> dict[str, float]:
    """Estimate what leaves a host in a step along each axis."""
    ### BEGIN SOLUTION
    sent_bytes = step_bytes(shape, sizes, sequences)
    own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

    def crossing(axis: str) -> int:
        return sum(to not in own for rank in own for to in destinations(axis, rank, sizes))

    return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}
    ### END SOLUTION


# %% tags=["check"] grade_id="check-leaving-bytes" points=2
check.leaving_bytes()

# %% [markdown]
# A model of 70 billion parameters trains on 4 hosts with 8 GPUs each, with dp = 2, pp = 2 and tp = 8, and 64 sequences
# per step. The next cells compute what leaves host 0 with each order of the axes.

# %%
# %%ranks
from itertools import permutations

from shared.planner.shapes import SHAPES

llama, leaving = SHAPES["Llama-2 70B"], {}
for order in permutations({"dp": 2, "pp": 2, "tp": 8}.items()):
    leaving[" × ".join(axis for axis, _ in order)] = leaving_bytes(llama, dict(order), 64, 8)

# %%
from shared import tables

leaving = ranks.pull("leaving")[0]
rows = [
    [
        order,
        *(f"{found[axis] / 1e9:,.0f}" for axis in ("dp", "pp", "tp")),
        f"{sum(found.values()) / 1e9:,.0f}",
    ]
    for order, found in leaving.items()
]
total = {order: sum(found.values()) for order, found in leaving.items()}
assert min(total, key=total.get).endswith("tp")
assert total["tp × pp × dp"] > 10 * total["dp × pp × tp"]
tables.Table(["from the outermost axis", "dp, GB", "pp, GB", "tp, GB", "total, GB"], rows)

# %% [markdown]
# Tensor parallelism sends by far the most, because it exchanges the activations of every layer. So tp is the innermost
# axis, and stays inside a host. Then only the gradients (once per step) and the outputs of one layer leave the host.

# %% [markdown]
# ## Exercise 18.4 · Tensor parallelism inside a pipeline (9 min, 2 points)
#
# `split_model` combines two axes. It first splits every layer over tp, and then distributes the layers over pp. All
# ranks with the same tp coordinate form a pipeline of their own: rank 0 of tp sends to rank 0 of tp on the next stage.
#
# `token_loss` is given. It computes the loss from the logits of this rank's part of the vocabulary, as `ParallelGPT`
# does in lab 13: the logits of padding do not take part.
#
# - Split the model with `parallelize(model, group)`, which changes it in place, and also returns it.
# - Return `Pipeline(layers, schedule, micro_batches, loss_fn, group)` with the layers of `gpt_layers(model)`. `loss_fn`
#   takes only the logits and the targets, so fix the other arguments of `token_loss` with `partial`. `vocab_size` is
#   `model.config.vocab_size`.
# - Each of the three calls needs a group. Think about which axis it belongs to.
# - You know the calls from the lesson's `Train3D`. Two things are new: the loss leaves out padding, and you choose the
#   groups yourself.
#
# The first check trains a small GPT with tp = 2, and then with pp = 2. The others combine the two, and try tied
# embeddings and schedules.
#
# <details><summary>Hint</summary>
#
# Which ranks exchange parts of a layer's sums, which ranks exchange the outputs of a stage, and which ranks have the
# other logits of a token?
#
# </details>


# %% tags=["export"]
# %%ranks
def token_loss(logits: Tensor, targets: Tensor, *, vocab_size: int, group: ProcessGroup) -> Tensor:
    """Return the mean cross-entropy of logits that are split over the ranks of a group, without those of padding.

    Shape: logits (B, T, V / tp), padded; targets (B, T); returns a scalar.
    Communication: two all-reduces, of one and two numbers per target.
    """
    columns = logits.shape[-1]
    used = max(0, vocab_size - dist.get_rank(group) * columns)
    is_padding = torch.arange(columns, device=logits.device) >= used
    return vocab_parallel_cross_entropy(logits.masked_fill(is_padding, -torch.inf), targets, group)


# %% tags=["exercise", "export"] grade_id="split-model"
# %%ranks
def split_model(
    model: TinyGPT, mesh: DeviceMesh, schedule: str = "1f1b", micro_batches: int = 8
) -> Pipeline:
    """Split each layer of a GPT over tp, and distribute the layers over pp. The model must be the same on every rank.

    Memory: about 1 / (pp · tp) of the parameters, once nothing else refers to the model.
    Communication: that of chapter 13 along tp, and that of chapter 15 along pp.
    Raises:
        ValueError: if tp does not divide the heads, if there are fewer layers than stages, or if the schedule cannot
            work.
    """
    ### BEGIN SOLUTION
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)
    loss_fn = partial(token_loss, vocab_size=model.config.vocab_size, group=tp_group)
    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, pp_group)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-split-model" points=2
check.split_model()

# %% [markdown]
# ## Exercise 18.5 · Data parallelism (13 min, 3 points)
#
# `Parallel3D(model, mesh, optimizer_cls)` puts data parallelism around this pipeline. The constructor is given. It sets
# these attributes:
#
# - `pipeline`: the result of `split_model`.
# - `stage`: a module with the layers of this rank's stage.
# - `dp_group`: the group of this rank along dp.
# - `replicas`: the number of replicas, which is dp.
# - `optimizer`: a plain optimizer for the stage's parameters with `zero_stage=0`, or a `ZeRO1` over `dp_group` with
#   `zero_stage=1`.
# - `replica`: only with `zero_stage=0`. It is an `OverlappedDDP` of the stage, over `dp_group`.
#
# Write two methods. `own_part(batch)` returns this replica's part of a global batch, which every rank has:
#
# - Replica d gets the d-th of dp equal, contiguous parts. All ranks of a replica need the same part.
# - If the samples cannot be divided evenly, raise a `ValueError` that names both numbers.
#
# `step(inputs, targets)` computes the gradients of a global batch:
#
# - Run `self.pipeline.step` on this replica's part. With `zero_stage=0`, its backward must not send gradients along dp,
#   because each parameter gets one gradient per micro-batch. `self.replica.no_sync()` is the context manager for that.
# - Then average the gradients over dp, exactly once. With `zero_stage=0`, call `finish_gradient_sync()` after
#   `no_sync()` has ended. With `zero_stage=1`, there is nothing to do: `ZeRO1` averages them in its own `step()`.
# - Return the mean loss of the *global* batch, the same on every rank. The pipeline's loss is that of one replica.
#
# `step` does not update any parameter. As in lab 15, the caller does that, with `optimizer.step()`.
#
# The first check trains with dp = 2. The others try every mesh of one to four ranks, and ZeRO-1.
#
# <details><summary>Hint 1</summary>
#
# With dp = 2, pp = 1 and tp = 2, ranks 0 and 1 belong to the same replica. What does `dist.get_rank(group)` return on
# them for the group along dp?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The loss of the global batch is the mean of the replicas' losses, because their parts are equally large. `step` may
# add one all-reduce of one element. What must happen to its result?
#
# </details>


# %% tags=["export"]
# %%ranks
class Parallel3D(nn.Module):
    """Trains a GPT on a mesh: each layer is split over tp, the layers over pp, and the batch over dp.

    Args:
        model: The whole model, the same on every rank. It is split in place.
        mesh: A mesh with the axes "dp", "pp" and "tp", of all ranks.
        optimizer_cls: The class of the optimizer that updates the stage's parameters.
        schedule: The schedule of the pipeline.
        micro_batches: The number of micro-batches of each replica.
        zero_stage: 0 keeps the optimizer state on each replica, 1 shards it over dp. Others raise a ValueError.
        defaults: Keyword arguments of the optimizer.

    Memory: about 1 / (pp · tp) of the model state. ZeRO-1 also divides the optimizer state by dp.
    Communication: per step, that of chapters 13 and 15 along tp and pp. Along dp, one all-reduce per bucket of the
        stage's gradients, or with ZeRO-1 one reduce-scatter and one all-gather; and one all-reduce of the loss.
    Source: Narayanan et al. 2021, "Megatron-LM", §3; Smith et al. 2022, "Megatron-Turing NLG 530B", §3.
    """

    def __init__(
        self,
        model: TinyGPT,
        mesh: DeviceMesh,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        schedule: str = "1f1b",
        micro_batches: int = 8,
        zero_stage: int = 0,
        **defaults,
    ):
        super().__init__()
        if zero_stage not in (0, 1):
            raise ValueError(f"zero_stage must be 0 or 1, got {zero_stage}")
        self.dp_group, self.zero_stage = mesh.get_group("dp"), zero_stage
        self.replicas, self.tp_size = mesh["dp"].size(), mesh["tp"].size()
        self.pipeline = split_model(model, mesh, schedule, micro_batches)
        self.stage = nn.ModuleList(self.pipeline.chunks)
        names = sharded_names(self.stage)
        self.sharded = {p for name, p in self.stage.named_parameters() if name in names}
        self.add_data_parallelism(optimizer_cls, defaults)


# %% tags=["export"]
# %%ranks
class Parallel3D(Parallel3D):
    def add_data_parallelism(self, optimizer_cls: Callable, defaults: dict) -> None:
        """Build the optimizer, and what averages gradients over dp."""
        parameters = self.stage.parameters()
        if self.zero_stage == 0:
            self.replica = OverlappedDDP(self.stage, group=self.dp_group)
            self.optimizer = optimizer_cls(parameters, **defaults)
        else:
            self.optimizer = ZeRO1(parameters, optimizer_cls, self.dp_group, **defaults)

    def stage_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, by their names in the whole model."""
        return self.pipeline.stage_parameters()


# %% tags=["exercise", "export"] grade_id="parallel-3d-step"
# %%ranks
class Parallel3D(Parallel3D):
    def own_part(self, batch: Tensor) -> Tensor:
        """Return this replica's part of a global batch.

        Shape: batch (B, …); returns (B / dp, …).
        Raises:
            ValueError: if the batch cannot be divided evenly.
        """
        ### BEGIN SOLUTION
        if len(batch) % self.replicas:
            raise ValueError(
                f"a batch of {len(batch)} samples cannot be split over {self.replicas} replicas"
            )
        return batch.chunk(self.replicas)[dist.get_rank(self.dp_group)]
        ### END SOLUTION

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a global batch to those of the stage's parameters.

        Args:
            inputs: The tokens of the global batch, on every rank.
            targets: Their targets.

        Returns:
            The mean loss of the global batch, in float64, the same on every rank.

        Shape: inputs and targets (B, T).
        """
        expect_equally_ignored(targets, self.replicas * self.pipeline.micro_batches)
        ### BEGIN SOLUTION
        own = self.own_part(inputs), self.own_part(targets)
        if self.zero_stage == 0:
            with self.replica.no_sync():
                loss = self.pipeline.step(*own)
            self.replica.finish_gradient_sync()
        else:
            loss = self.pipeline.step(*own)  # the optimizer averages the gradients
        dist.all_reduce(loss, group=self.dp_group)
        return loss / self.replicas
        ### END SOLUTION


# %% tags=["check"] grade_id="check-parallel-3d" points=3
check.Parallel3D()

# %% [markdown]
# The next cells train on three meshes, and sort what rank 0 sends in one step by axis. Each collective runs in the
# group of one axis.

# %%
# %%ranks
from shared import wire
from shared.data import CharTokens
from shared.models import GPTConfig

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, context=32, layers=4, heads=4, width=64)
inputs, targets = (each.to(device) for each in text.windows(range(0, 1600, 100), 32))


def sent_by_axis(sizes):
    """Take two steps. Returns the bytes that this rank sends in the second one, by axis."""
    parallel = Parallel3D(
        TinyGPT(config).to(device), make_mesh(**sizes), torch.optim.AdamW, micro_batches=4, lr=1e-3
    )
    for _ in range(2):
        parallel.optimizer.zero_grad()
        with wire.ledger() as log:
            parallel.step(inputs, targets)
            parallel.optimizer.step()
    axes = {tuple(ranks_along(axis, rank, sizes)): axis for axis in sizes}
    found = dict.fromkeys(sizes, 0.0)
    for entry in log.entries:
        if len(entry.group_ranks) > 1:
            found[axes[entry.group_ranks]] += entry.sent_bytes
    return found


two_by_two = {
    "dp × tp": sent_by_axis({"dp": 2, "pp": 1, "tp": 2}),
    "pp × tp": sent_by_axis({"dp": 1, "pp": 2, "tp": 2}),
    "dp × pp": sent_by_axis({"dp": 2, "pp": 2, "tp": 1}),
}

# %%
found = ranks.pull("two_by_two")[0]
rows = [
    [name, *(f"{nbytes / 1e3:,.0f}" for nbytes in sent.values())] for name, sent in found.items()
]
assert found["pp × tp"]["tp"] > 3 * found["pp × tp"]["pp"] > 0
tables.Table(["rank 0, KB per step", "dp", "pp", "tp"], rows)

# %% [markdown]
# Even on this small model, tp sends the most, and pp the least. So tp needs the fastest link, and pp can have the
# slowest.

# %% [markdown]
# ## Exercise 18.6 · A norm over three axes (14 min, 3 points)
#
# To clip gradients, all ranks need the norm of the gradient of the *whole* model. Most ranks have parts of it that
# other ranks have, too, and each element must count once. The rule is short: if c ranks have the same gradient, each of
# them adds its square divided by c. The sum over *all* ranks of the mesh is then right.
#
# `copies_of(parameter)` returns c, which is a product of one factor per axis:
#
# - tp: `self.tp_size` for a replicated parameter, such as a norm's, and 1 for a shard. `self.sharded`, a set of
#   parameters, is given.
# - pp: the number of stages that have the parameter. Tied parameters are in `self.pipeline.tied`, the list of pairs
#   `(parameter, stages)` of lab 15. All others are on one stage.
# - dp: after `step`, all replicas have the same gradients with `zero_stage=0`. With `zero_stage=1`, each replica counts
#   its own shard only.
#
# `gradients()` is given. It returns the pairs `(parameter, gradient)` that this rank counts. With ZeRO-1, a gradient is
# the part of the parameter's averaged gradient that lies in this rank's shard.
#
# `clip_grad_norm_(max_norm)` returns the norm before scaling, as a tensor without dimensions in float64, the same on
# every rank:
#
# - Compute the squares and their sum in float64, also for gradients in float32. Call `dist.all_reduce` once, on one
#   element. The mesh contains all ranks, so it needs no group.
# - As in lab 15, scale the gradients by `max_norm / (norm + 1e-6)` if this is less than 1.
#
# The first check clips on plain layouts of two ranks. The others try every mesh, tied embeddings, ZeRO-1 and float32.
#
# <details><summary>Hint 1</summary>
#
# With dp = 2 and tp = 2, which ranks have the same gradient of a norm's weight? And of a row of the embedding?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A tied embedding is on two stages, and each tp rank has a different shard of it. How many ranks of one replica have
# the same shard?
#
# </details>


# %% tags=["export"]
# %%ranks
def pieces_of(flat_parameter: FlatParameter) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter that has elements in this rank's shard of a flat parameter, with the gradient of these.

    Shape: each gradient [k], a view of shard.grad.
    """
    layout, gradient = flat_parameter.layout, flat_parameter.shard.grad
    begin = -dist.get_rank(layout.group) * len(gradient)
    for parameter in layout.parameters:
        end = begin + parameter.numel()
        piece = gradient[max(begin, 0) : max(end, 0)]
        if piece.numel():
            yield parameter, piece
        begin = end


# %% tags=["export"]
# %%ranks
class Parallel3D(Parallel3D):
    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return this rank's averaged gradients, each with its parameter. With ZeRO-1, those of its shard."""
        if self.zero_stage == 0:
            parameters = self.stage.parameters()
            return [
                (parameter, parameter.grad)
                for parameter in parameters
                if parameter.grad is not None
            ]
        self.optimizer.reduce_gradients()
        return [pair for flat in self.optimizer.flat_parameters for pair in pieces_of(flat)]


# %% tags=["exercise", "export"] grade_id="clip-grad-norm"
# %%ranks
class Parallel3D(Parallel3D):
    def copies_of(self, parameter: nn.Parameter) -> int:
        """Return how many ranks of the mesh count the same gradient of a parameter."""
        ### BEGIN SOLUTION
        stages = dict(self.pipeline.tied).get(parameter, [self.pipeline.stage])
        along_tp = 1 if parameter in self.sharded else self.tp_size
        along_dp = self.replicas if self.zero_stage == 0 else 1
        return len(stages) * along_tp * along_dp
        ### END SOLUTION

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm of the whole model's gradient is at most max_norm.

        Returns:
            The norm before scaling, the same on every rank.

        Communication: one all-reduce of one element, over the mesh; with ZeRO-1, first a reduce-scatter along dp, which
            the optimizer's step() does not repeat.
        """
        ### BEGIN SOLUTION
        gradients = self.gradients()
        total = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        for parameter, gradient in gradients:
            total += gradient.double().square().sum() / self.copies_of(parameter)
        dist.all_reduce(total)
        norm = total.sqrt()
        for _, gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
        ### END SOLUTION


# %% tags=["check"] grade_id="check-clip-grad-norm" points=3
check.clip_grad_norm_()

# %% [markdown]
# ## Exercise 18.7 · Which layout? (17 min, 3 points)
#
# "TP inside a host, PP across hosts, DP for the rest" is a common rule. It leaves open how large each of them should
# be. The lesson's planner computes these sizes, but here it lacks two pieces: the bubble, and the choice.
#
# `bubble_s(busy_s, message_s, layout)` returns how many seconds the slowest stage waits in a step. Stages may take
# different times: one that has the output layer is slower than the others. `busy_s[stage]` is how long a stage is busy
# with *one* micro-batch, forward and backward together, and `message_s` how long this micro-batch's messages take
# between two neighbors, again in both directions.
#
# - The slowest stage sets the pace. We assume that it never waits between its first and its last action.
# - Before and after that, the pipeline fills and drains. Then one micro-batch passes through all *other* stages,
#   forward and backward, and crosses every link between neighbors.
# - With `layout.schedule == "interleaved"`, only 1/v of this is left (v is `layout.chunks`), and with `"zero_bubble"`
#   a third. All other schedules wait for all of it.
# - `layout.pp` is the number of stages. With one stage, there is no bubble.
#
# For example, take stages that are busy for 3, 4, 3 and 5 s, and messages of 0.5 s. Between stages, there are three
# links. 1F1B waits 3 + 4 + 3 + 3 · 0.5 = 11.5 s, and an interleaved schedule with v = 2 waits 5.75 s.
#
# The first check uses equal stages. The second one draws stages, messages and schedules.
#
# <details><summary>Hint</summary>
#
# How does (p − 1)/m of the ideal time (chapter 15) follow from your result, if all stages are equal?
#
# </details>


# %% tags=["exercise", "export"] grade_id="bubble-s" module="layouts"
# %%ranks
def bubble_s(busy_s: Sequence[float], message_s: float, layout: TrainingLayout) -> float:
    """Estimate how long the slowest stage of a pipeline waits in a step, while the pipeline fills and drains."""
    ### BEGIN SOLUTION
    waits_s = sum(busy_s) - max(busy_s) + (layout.pp - 1) * message_s
    if layout.schedule == "interleaved":
        return waits_s / layout.chunks
    return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s
    ### END SOLUTION


# %% tags=["check"] grade_id="check-bubble-s" points=1
check.bubble_s()

# %% [markdown]
# Now the choice. A planner that is off by up to 10% cannot name *the* best layout. So your function returns all layouts
# that it cannot tell from the fastest.
#
# **Predict.** Which dp, pp and tp does the fastest layout have in each of the three situations below? The second one is
# the lesson's. In the third one, the eight GPUs of a host share one adapter of 400 Gbit/s.

# %%
from shared.planner.search import SITUATIONS

for name in SITUATIONS:
    print(name)

# %%
my_layouts = [None, None, None]  # for example (4, 1, 8), if dp = 4, pp = 1 and tp = 8

# %% [markdown]
# `choose_layouts(job, cluster)` returns a list of layouts that fit, from the fastest to the slowest:
#
# - `possible(job, cluster)` yields every layout to try: all dp, pp, tp, ZeRO stages, micro-batches, kinds of
#   checkpointing and schedules that divide the job.
# - `memory(job, layout).total_bytes` is what the fullest GPU needs. A layout fits if this is at most `USABLE` (90%) of
#   `cluster.gpu.memory_bytes`.
# - `step_time(job, layout, cluster, bubble_s).total_s` are the seconds of a step, with *your* bubble.
# - Of the layouts with the same `layout.sizes` (a text such as "DP 4 × PP 1 × TP 8"), keep a fastest one. Of equally
#   fast ones, any will do.
# - Of these, return all that take at most `1 + TIE` (1.2) times as long as the fastest. If nothing fits, return an
#   empty list.
#
# The first check tries the three situations. The others draw jobs and clusters.
#
# <details><summary>Hint 1</summary>
#
# A dictionary from `layout.sizes` to the best layout so far, with its seconds, is enough.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Which layouts have to be left out first: those that do not fit, or those that are too slow?
#
# </details>


# %% tags=["exercise", "export"] grade_id="choose-layouts" module="layouts"
# %%ranks
def choose_layouts(job: Job, cluster: Cluster) -> list[TrainingLayout]:
    """Return the layouts that fit and that a planner cannot tell from the fastest one, one per dp × pp × tp."""
    ### BEGIN SOLUTION
    fastest: dict[str, tuple[float, TrainingLayout]] = {}
    for layout in possible(job, cluster):
        if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
            continue
        seconds = step_time(job, layout, cluster, bubble_s).total_s
        if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
            fastest[layout.sizes] = seconds, layout
    ordered = sorted(fastest.values(), key=lambda pair: pair[0])
    return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-choose-layouts" points=2
check.choose_layouts()

# %%
# %%ranks --timeout 120
from shared.planner.search import SITUATIONS

chosen = [choose_layouts(*situation) for situation in SITUATIONS.values()]


# %%
from shared.planner.layouts import step_time

rows = []
of_situations = ranks.pull("chosen")[0]
for (name, (job, cluster)), mine, tied in zip(
    SITUATIONS.items(), my_layouts, of_situations, strict=True
):
    steps = [f"{step_time(job, layout, cluster).total_s:.3g} s" for layout in tied]
    rows.append([name, "{} × {} × {}".format(*mine) if mine else "", str(tied[0]), steps[0]])
    others = zip(tied[1:3], steps[1:3], strict=True)
    rows += [["", "", str(layout), f"{seconds}, a tie"] for layout, seconds in others]
    rows.append(["", "", f"and {len(tied) - 3} more", f"up to {steps[-1]}"])
tables.Table(["", "predicted", "computed", "step"], rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
from shared.planner.search import search

for situation, tied in zip(SITUATIONS.values(), of_situations, strict=True):
    assert [each.layout.sizes for each in search(*situation).tied()] == [
        each.sizes for each in tied
    ]
assert [len(tied) for tied in of_situations] == [8, 7, 5]
assert [(tied[0].dp, tied[0].pp, tied[0].tp) for tied in of_situations] == [
    (8, 1, 1),
    (8, 1, 4),
    (1, 8, 4),
]

# %% [markdown]
# The planner is the lesson's, so the second situation has the lesson's answer: with eight adapters per host, seven
# divisions of the GPUs are a tie, from DP 8 to a single replica. In the third situation, with one adapter per host,
# faster GPUs and a quarter of the sequences, five divisions are a tie, and a single replica leads: gradients and
# ZeRO-3's parameters would have to cross the slow link, and a pipeline's messages are the cheapest thing that can cross
# it.
#
# The 7B model fits on one GPU, except for its optimizer state, so ZeRO-1 alone is the fastest. There, even TP 4 is part
# of the tie: on one host, little depends on the layout. Where the planner says "a tie", measure.

# %% [markdown]
# ## Break it: four mistakes that raise no error (11 min)
#
# Each class below makes one mistake. The next cells train them and your `Parallel3D` on four ranks, with dp = 2 and tp
# = 2, and clip the gradients:
#
# - `SlicesByRank` chooses the part of the batch by the rank in the world, and not by the coordinate along dp.
# - `NeverAverages` forgets the average over dp.
# - `AveragesTwice` divides by dp once more.
# - `AveragesOverAll` averages once more, with `group=None`, which means all ranks.
#
# **Predict.** Which of them show a wrong loss in the first step? And which show the right first loss, but a wrong norm?


# %%
my_prediction = {  # True or False
    "SlicesByRank": {"first loss": None, "only the norm": None},
    "NeverAverages": {"first loss": None, "only the norm": None},
    "AveragesTwice": {"first loss": None, "only the norm": None},
    "AveragesOverAll": {"first loss": None, "only the norm": None},
}

# %%
# %%ranks


class SlicesByRank(Parallel3D):
    def own_part(self, batch):
        return batch.chunk(self.replicas)[rank % self.replicas]


class NeverAverages(Parallel3D):
    def add_data_parallelism(self, *arguments):
        dp_group = self.dp_group
        self.dp_group, _ = dist.new_subgroups(1)  # Each rank averages with itself.
        super().add_data_parallelism(*arguments)
        self.dp_group = dp_group


class AveragesTwice(Parallel3D):
    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        for parameter in self.stage.parameters():
            parameter.grad /= self.replicas
        return loss


class AveragesOverAll(Parallel3D):
    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        for parameter in self.stage.parameters():
            parameter.grad /= world_size
            dist.all_reduce(parameter.grad)
        return loss


# %%
# %%ranks --timeout 180
mesh = make_mesh(dp=2, pp=1, tp=2)


def history(parallel_cls, steps=20):
    """Train. Returns the loss and the norm of the gradients of each step."""
    model = TinyGPT(config).double().to(device)
    parallel = parallel_cls(model, mesh, torch.optim.AdamW, micro_batches=2, lr=3e-3)
    found = torch.zeros(steps, 2, dtype=torch.float64, device=device)
    for number in range(steps):
        batch = text.windows(range(1000 * number, 1000 * number + 800, 100), 32)
        parallel.optimizer.zero_grad()
        loss = parallel.step(*(each.to(device) for each in batch))
        found[number] = torch.stack([loss, parallel.clip_grad_norm_(0.2)])
        parallel.optimizer.step()
    return found.tolist()


mistakes = (SlicesByRank, NeverAverages, AveragesTwice, AveragesOverAll)
histories = {"right": history(Parallel3D), **{each.__name__: history(each) for each in mistakes}}

# %%
histories = ranks.pull("histories")[0]
rows = [
    [name, *(f"{its[step][0]:.4f}" for step in (0, 1, 19)), f"{its[0][1]:.4f}"]
    for name, its in histories.items()
]
tables.Table(["rank 0", "loss, step 1", "step 2", "step 20", "norm, step 1"], rows)

# %%
right, measured = histories["right"], {}
for name in my_prediction:
    pairs = zip(histories[name][0], right[0], strict=True)
    first_loss, first_norm = (abs(a - b) > 1e-9 for a, b in pairs)
    measured[name] = {"first loss": first_loss, "only the norm": first_norm and not first_loss}
    yours = "" if None in my_prediction[name].values() else f"you predicted {my_prediction[name]}, "
    print(f"{name}: {yours}measured {measured[name]}")
assert [each["first loss"] for each in measured.values()] == [True, False, False, False]
assert [each["only the norm"] for each in measured.values()] == [False, True, True, True]

# %% [markdown]
# With `SlicesByRank`, two ranks of one replica see different samples, and still add up their partial sums. The other
# three have the right loss at first, because forward is right. In the first step, only the norm of the gradients gives
# them away.
#
# `AveragesTwice` only causes a wrong scale, which clipping and AdamW hide. With `NeverAverages`, the replicas slowly
# drift apart. With `AveragesOverAll`, different shards get the same gradient, as in the lesson. The checks of this lab
# compare every gradient and every norm with those of one process, so they find all four in the first step.
#
# With the finished module, the training script has this as a strategy: `torchrun --nproc_per_node=4 -m solutions.train
# --model gpt --strategy 3d --dp 2 --pp 1 --tp 2 --zero-stage 1`.

# %%
ranks.stop()
