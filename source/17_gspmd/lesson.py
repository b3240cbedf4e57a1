# ---
# jupyter:
#   course:
#     module: gspmd
# ---

# %% [markdown]
# # 17 · GSPMD
#
# **45–70 minutes.** After this lesson, you will be able to:
#
# - describe how a tensor is distributed over a mesh of devices, in JAX and in torch,
# - predict which collective an operation needs, and read from a compiled program which one it got,
# - get FSDP and tensor parallelism from annotations, and say when the compiler needs more of them,
# - explain where your own ZeRO-3 and TP, DTensor and XLA differ, collective by collective,
# - find a tensor that still has to be added up over the ranks.
#
# You need `ZeRO3` (chapter 10), device meshes (chapter 11) and tensor parallelism (chapter 13). f is (N−1)/N on N
# ranks.

# %% [markdown]
# ## Where we are
#
# In chapter 13, you split a GPT by hand. Dozens of lines of that code mention a group of ranks. Every one of them could
# contain a mistake like those at the end of that chapter. To split the model in another way, you have to write most of
# them again.
#
# Could a compiler write them? You would only say where the weights are, and it would find the collectives. In this
# lesson, it does. You will also see it send twice what FSDP needs and four times what experts need, without a warning.
# So learn to read what it has inserted.

# %% tags=["nbval-ignore-output"]
import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared import plots, ranks, spmd, tables
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.plots import diagrams
from shared.plots.placements import placements
from shared.predictions import predicted

# %% [markdown]
# ## The idea: say where tensors are
#
# In **GSPMD**, you write the program for one device, and add *annotations*, which state the *layout* of some tensors:
# how they are distributed over a mesh. The compiler chooses all other layouts, and inserts the collectives (Xu et al.
# 2021). The result is SPMD (single program, multiple data, chapter 00): all devices run one program, on their own
# shards.
#
# How does the compiler get from a few annotated tensors to all others? Each operation has a rule in letters, as in
# `torch.einsum`: one letter per dimension. The matrix product x A is `ij,jk->ik`, and its letters say what follows if
# one of them is split over the devices:
#
# | letter | in x | in A | in the result | if it is split, a device has |
# |---|---|---|---|---|
# | i | rows | – | rows | some rows of the result |
# | j | columns | rows | – | one term of every element, because the product sums over j |
# | k | – | columns | columns | some columns of the result |
#
# Suppose that you annotate only x, and split its letter j. A has no annotation, so the compiler splits it along j,
# too. Annotations spread in this way, forward to results and backward to operands, until nothing changes. This is
# **propagation**. In GSPMD, operations such as gelu and add go first, because their operands and results share one
# layout, and products later. Where two layouts disagree, such priorities decide, and nobody counts the bytes of the
# whole program (Xu et al. 2021, §3.5).
#
# What you have annotated keeps its layout, even if another one would be cheaper. Only when all layouts are chosen
# does the *partitioner* insert collectives: where an operation needs an operand in another layout, and where devices
# have only terms of a sum.
#
# GSPMD is the name of the paper and of the idea. We run it in JAX, a library for computing with arrays, and its
# compiler, XLA. Since JAX 0.7, a newer part, Shardy, propagates by default, and XLA still partitions.
#
# In JAX, `weight` below is a **global array**: one object with the shape of the whole matrix, of which each device
# stores a part. The next cell makes JAX treat this computer as 32 devices, and tiles the weight over them:

# %%
spmd.virtual_devices(32)
# Auto: along these axes, the compiler may choose layouts. The other types of axes come later.
mesh = jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
layout = NamedSharding(mesh, P("x", "y"))
weight = jax.device_put(np.ones((2048, 4096), np.float32), layout)
tiles = [shard.data.shape for shard in weight.addressable_shards]
print(f"{len(tiles)} devices, each with a tile of {tiles[0]}")
assert tiles == [(512, 512)] * 32

# %% [markdown]
# An *axis* is a dimension of a mesh. A **partition spec** `P(…)` has one entry per dimension of the tensor: the axis
# along which it is split, or `None`, which may be left out at the end. Along an axis that the spec does not mention,
# the tensor is replicated. In the figure, look at what the colored device holds:

# %%
diagrams.tiled_weight()

# %% [markdown]
# ## Five products
#
# Now we multiply a matrix x (256 × 2048) by A (2048 × 4096), in five layouts. The matrix x has nothing to do with the
# axis "x". The compiler may choose the layout of the result. What does a device need that it does not have?
#
# | case | x | A |
# |---|---|---|
# | 1 | `P()` | `P(None, "y")` |
# | 2 | `P("x")` | `P()` |
# | 3 | `P(None, "y")` | `P("y")` |
# | 4 | `P(None, "y")` | `P()` |
# | 5 | `P()` | `P("y")` |
#
# **Predict.** Which collective does the compiler insert in each case? Answer with "none", "all_gather", "all_reduce" or
# "reduce_scatter".

# %%
my_collectives = {1: None, 2: None, 3: None, 4: None, 5: None}


# %% tags=["nbval-ignore-output"]
def array(mesh, shape, *axes):
    """Describe an array and its layout, without allocating it."""
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*axes)))


def compiled(function, *arrays):
    # The function is compiled for arrays of these shapes and layouts, but not run.
    return jax.jit(function).lower(*arrays).compile()


# %%
layouts = {
    1: ((), (None, "y")),
    2: (("x",), ()),
    3: ((None, "y"), ("y",)),
    4: ((None, "y"), ()),
    5: ((), ("y",)),
}
programs = {}
for case, (of_x, of_a) in layouts.items():
    x, a = array(mesh, (256, 2048), *of_x), array(mesh, (2048, 4096), *of_a)
    programs[case] = compiled(jnp.matmul, x, a)

# %% [markdown]
# A compiled program is text in HLO, XLA's language. `spmd.of_program` finds its collectives, and computes what a device
# sends in a ring:

# %%
rows, found = [], {}
for case, program in programs.items():
    inserted = spmd.of_program(program, mesh)
    found[case] = inserted[0].op if inserted else "none"
    sizes = [f"{each.elements:,} along {each.axes}" for each in inserted]
    mb = f"{spmd.total(inserted) / 1e6:.1f}"
    rows.append([str(case), my_collectives[case] or "", found[case], *(sizes or [""]), mb])
tables.Table(["case", "predicted", "compiled", "elements", "MB sent"], rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert list(found.values()) == ["none", "none", "all_reduce", "all_gather", "all_gather"]
sent = {case: spmd.total(spmd.of_program(program, mesh)) for case, program in programs.items()}
assert sent[5] == 4 * sent[3] == 16 * sent[4]

# %% [markdown] tags=["introduction"]
# The figure shows why, for four devices. S is the size of a whole matrix:

# %%
diagrams.five_products()

# %% [markdown]
# A sharded matrix meets a replicated one in four of these cases. XLA inserts an all-gather in two:
#
# - In cases 1 and 2, a device has all it needs for its own part of the result. Case 1 is column parallelism, and case 2
#   is data parallelism.
# - In case 3, both matrices are split along the **contracted** dimension, over which the product sums. This is row
#   parallelism.
# - In cases 4 and 5, only one matrix is split along the contracted dimension, and XLA gathers it.
#
# XLA's choice is not always the best one. In case 5, each device could multiply its rows of A by the matching columns
# of x, which it already has. That is case 3, which sends a quarter of the bytes.

# %% [markdown]
# ## FSDP as an annotation
#
# In the next cell, eight devices split the batch and the rows of a weight along the same axis. `loss` and `step` do not
# mention devices:


# %%
def loss(w, x):
    return jnp.square(x @ w).mean()


def step(w, x):
    # jax.grad(loss) is a function. It returns the gradient of the loss with respect to w.
    return w - 0.1 * jax.grad(loss)(w, x)


line = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
shapes = (512, 512), (1024, 512)
annotated = compiled(step, *(array(line, shape, "d") for shape in shapes))

# %% [markdown]
# **Predict.** This step needs an all-gather of the weight, and a reduce-scatter of its gradient. Each sends f times the
# weight's bytes. Backward does not need the weight, because x needs no gradient. How many times f · (weight bytes) does
# the compiled program send? The step needs 2. In case 3, XLA added up terms with an all-reduce, but there, every device
# kept the whole sum.

# %%
my_multiple = None


# %%
def shard_step(shard, x):
    """Take the same step, with what one device holds, and with collectives by hand."""

    def own_loss(shard):
        # Tiled: the shards are concatenated. The loss is the mean over 8 devices.
        return loss(jax.lax.all_gather(shard, "d", tiled=True), x) / 8

    return shard - 0.1 * jax.grad(own_loss)(shard)


# %%
# shard_map runs shard_step on each device's own shards.
manual = jax.shard_map(shard_step, mesh=line, in_specs=P("d"), out_specs=P("d"))
by_hand = compiled(manual, *(array(line, shape, "d") for shape in shapes))
columns = {
    name: spmd.of_program(program, line)
    for name, program in {"annotated": annotated, "shard_map": by_hand}.items()
}
f_bytes = 7 / 8 * 4 * 512 * 512
print(f"{predicted(my_multiple)}compiled {spmd.total(columns['annotated']) / f_bytes:g}")
print("the annotated program cuts out a slice:", "dynamic-slice(" in annotated.as_text())
spmd.side_by_side(columns)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [each.op for each in columns["annotated"]] == ["all_gather", "all_reduce"]
assert [each.op for each in columns["shard_map"]] == ["all_gather", "reduce_scatter"]

# %% [markdown]
# On a CPU, XLA all-reduces the gradient, and then each device cuts out its own shard. The weights are right, but the
# factor is 3 instead of 2. For GPUs, XLA has a pass that turns an all-reduce followed by a slice into a reduce-scatter
# (`ReduceScatterCreator`; XLA pull request 31030). So read what *your* compiler has inserted.
#
# The second column is from `shard_map`. In a function that runs on each device's own shards, you write the collectives
# yourself. The gradient of an all-gather is a reduce-scatter, as in chapter 13. Both steps give the same weights as one
# device:

# %%
rng = np.random.default_rng(0)
w, x = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
w_shards, x_shards = (jax.device_put(each, NamedSharding(line, P("d"))) for each in (w, x))
updated = [jax.jit(way)(w_shards, x_shards) for way in (step, manual)]
assert all(np.allclose(step(w, x), each, atol=1e-5) for each in updated)

# %% [markdown]
# ## When the compiler needs help
#
# Next, we compile the gradients of an MLP with respect to A, B and x in three ways: with the annotations of FSDP, with
# one more for the inner activations, and with those of TP.


# %%
def mlp(a, b, x, keep=lambda inner: inner):
    return jnp.square(keep(jax.nn.gelu(x @ a)) @ b).mean()


def constrained(a, b, x):
    # The additional annotation: the inner activations are split like x.
    by_sample = NamedSharding(line, P("d"))
    return mlp(a, b, x, keep=lambda inner: jax.lax.with_sharding_constraint(inner, by_sample))


# %%
fsdp, tp = [("d",)] * 3, [(None, "d"), ("d",), ()]  # of a, b and x
ways = {"FSDP": (mlp, fsdp), "FSDP, constrained": (constrained, fsdp), "TP": (mlp, tp)}
columns = {}
for name, (function, specs) in ways.items():
    sizes = (512, 2048), (2048, 512), (1024, 512)
    arrays = [array(line, size, *spec) for size, spec in zip(sizes, specs, strict=True)]
    gradients = compiled(jax.grad(function, argnums=(0, 1, 2)), *arrays)
    columns[name] = spmd.of_program(gradients, line)
mega = 1024**2
spmd.side_by_side(columns, {2 * mega: "x or output", 4 * mega: "weight", 8 * mega: "inner"})

# %%
needs_mb = 2 * 7 / 8 * 2 * 4 * mega / 1e6  # an all-gather and a reduce-scatter of both weights
sends_mb = {name: spmd.total(column) / 1e6 for name, column in columns.items()}
plots.bars({"what FSDP needs": needs_mb} | sends_mb, "MB that a device sends")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [each.op for each in columns["TP"]] == ["all_reduce"] * 2
assert len(columns["FSDP"]) > 2 * len(columns["FSDP, constrained"]) == 6

# %% [markdown]
# TP gets the same collectives as a pair of layers in chapter 13: one all-reduce in forward, and one in backward.
#
# FSDP should send 14.7 MB here: an all-gather and a reduce-scatter of 8.4 MB of weights. The annotated program sends
# twice as much. Why? Two layouts meet at the inner activations. Going forward, x splits them by rows; going backward,
# the rows of B split them by columns. Some operations keep the first layout and others the second, so activations
# have to move between the two. Four all-to-alls do that, each of 8.4 MB, of which the table shows one device's
# eighth. So do the three all-gathers of 2.1 and 8.4 MB. Only the two all-gathers of 4.2 MB fetch weights.
#
# One more annotation ends the disagreement: two all-gathers remain, and one all-reduce of both gradients. They send
# 22.0 MB, and all that is still too much is the CPU's all-reduce in place of a reduce-scatter.

# %% [markdown]
# ## Experts along a sharded axis
#
# In chapter 16, you wrote the two all-to-alls of a mixture of experts. GShard, GSPMD's predecessor, leaves them to the
# compiler (Lepikhin et al. 2020, §3). Each device has a group g of s tokens, and an expert e with room for c rows of
# each group. `mask[g, s, e, c]` is 1 where token s is row c, and `weights` has the router's weight there. All arrays
# are split along their first dimension. We compile the layer for two sizes, with and without a constraint on the rows:


# %%
def experts(mask, weights, x, up, down, keep=lambda rows: rows):
    rows = keep(jnp.einsum("gsec,gsm->egcm", mask, x))  # dispatch
    inner = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, up))
    outputs = jnp.einsum("egch,ehm->egcm", inner, down)
    return jnp.einsum("gsec,egcm->gsm", weights, outputs)  # combine


def constrained_experts(*arrays):
    by_expert = NamedSharding(line, P("d"))
    return experts(*arrays, keep=lambda rows: jax.lax.with_sharding_constraint(rows, by_expert))


# %%
columns, (g, e, m, h) = {}, (8, 8, 512, 1024)
for s, c in ((128, 32), (1024, 256)):
    sizes = (g, s, e, c), (g, s, e, c), (g, s, m), (e, m, h), (e, h, m)
    arrays = [array(line, size, "d") for size in sizes]
    for name, function in {"annotated": experts, "constrained": constrained_experts}.items():
        columns[f"{name}, s = {s:,}"] = spmd.of_program(compiled(function, *arrays), line)
spmd.side_by_side(columns)

# %% tags=["claims"] jupyter={"source_hidden": true}
ops = [[each.op for each in column] for column in columns.values()]
assert ops == [["all_to_all"] * 2] * 2 + [["all_gather"] * 2, ["all_to_all"] * 2]
assert columns["constrained, s = 1,024"][0].sent_bytes == 7 / 8 * 4 * e * 256 * m

# %% [markdown]
# With few tokens, you get your dispatch and your combine: the rows are split by g before the first all-to-all, and by e
# after it. With more tokens, XLA leaves them in place, and gathers both matrices of all experts, which sends four times
# as much.
#
# The annotations are the same, so only sizes can make the difference. In both cases, XLA moves the smaller operand of
# the product, as if it compared whole operands, one product at a time. With few tokens, that is the rows of all
# groups: 4.2 MB, against 16.8 MB for one matrix of all experts. With more tokens, the rows have 33.6 MB, so it moves
# the matrix. But what counts is what a device sends, and that is far less for an all-to-all of the large rows (3.7
# MB) than for an all-gather of the matrix (14.7). The table hides that a little, as it shows one device's eighth of
# an all-to-all, but the whole of an all-gather. The constraint says that the rows belong to the experts, as GShard's
# annotation does.

# %% [markdown]
# ## Auto, explicit and manual axes
#
# Twice now, the compiler has chosen a layout that sends too much, and said nothing. Could it ask instead? It can,
# along an *explicit* axis. Each axis of a mesh has one of three types:
#
# | type | who decides the layouts | who inserts the collectives |
# |---|---|---|
# | auto | the compiler, from your annotations | the compiler |
# | explicit | JAX, while it traces, from the operands' types; an unclear one raises an error | the compiler |
# | manual | you, in `shard_map` | you |
#
# The next cell computes case 3 with explicit axes and smaller matrices:

# %%
typed = jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(typed):
    x = jax.device_put(np.ones((256, 512), np.float32), P(None, "y"))
    a = jax.device_put(np.ones((512, 1024), np.float32), P("y", None))
    print(f"x is {jax.typeof(x)}, A is {jax.typeof(a)}")
    try:
        x @ a
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    terms = jnp.einsum("ij,jk->ik", x, a, out_sharding=P(unreduced={"y"}))
print(f"not added up: {jax.typeof(terms)}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert "U:y" in str(jax.typeof(terms))

# %% [markdown]
# JAX does not guess what should happen to the terms. `out_sharding=P()` would ask for the sum. We keep the terms:
# `{U:y}` says that this array is *unreduced* along "y".

# %% [markdown]
# ## Placements in torch
#
# JAX keeps such terms only if you ask for them. What does torch do? Along an axis, it has the same three
# possibilities, split, replicated and unreduced, and calls them **placements**. A `DTensor` is a shard with its mesh,
# and a placement for each axis:

# %%
diagrams.placements()

# %% [markdown]
# `Shard(dim)` splits dimension `dim`. `Partial()` is what row parallelism leaves: each rank has a term, and the tensor
# is their sum. DTensor has no compiler. It decides what to send when an operation runs, and `redistribute` changes a
# placement.
#
# **Predict.** In how many of the five cases is the result a `Partial()`?

# %%
my_count = None

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=4)

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shared import spmd, wire
from shared.models import GPTConfig, TinyGPT

# %%
# %%ranks
line, R = init_device_mesh(device.type, (4,), mesh_dim_names=("d",)), Replicate()
torch.manual_seed(0)
x, a = torch.randn(256, 512, device=device), torch.randn(512, 256, device=device)
cases = [(R, Shard(1)), (Shard(0), R), (Shard(1), Shard(0)), (Shard(1), R), (R, Shard(0))]
products = []
for of_x, of_a in cases:
    own_x, own_a = distribute_tensor(x, line, [of_x]), distribute_tensor(a, line, [of_a])
    with wire.ledger() as log:
        product = own_x @ own_a
    products.append((repr(product.placements[0]), log.summary()))
    assert torch.allclose(product.full_tensor(), x @ a, atol=1e-3)

# %%
products = ranks.pull("products")[0]
partial = [placement for placement, _ in products if placement == "Partial(sum)"]
print(f"{predicted(my_count)}measured {len(partial)}")
assert len(partial) == 3 and {summary for _, summary in products} == {"no communication"}
rows = [[str(case), found[case], *each] for case, each in enumerate(products, 1)]
tables.Table(["case", "XLA", "DTensor's result", "its collectives"], rows)

# %% [markdown]
# No case communicates. In cases 4 and 5, each rank uses its part of the replicated tensor, so the result is partial. An
# all-reduce has to follow when an operation needs the sum. For the JAX program's sizes, that all-reduce costs 7.3 MB.
# In case 5, XLA's all-gather costs 29.4, so DTensor wins; in case 4 it costs 1.8, so XLA does. What does `redistribute`
# send?

# %%
# %%ranks
whole = distribute_tensor(x, line, [R])
rows = distribute_tensor(x, line, [Shard(0)])
moves = [(product, R), (product, Shard(0)), (rows, R), (rows, Shard(1)), (whole, Shard(0))]
sent = []
for tensor, target in moves:
    with wire.ledger() as log:
        tensor.redistribute(placements=[target])
    sent.append((repr(tensor.placements[0]), repr(target), log.summary()))

# %% tags=["nbval-ignore-output"]
sent = ranks.pull("sent")[0]
ops = [summary.split(" │ ")[0] for *_, summary in sent]
assert ops[:3] == ["1 all_reduce", "1 reduce_scatter", "1 all_gather"]
assert ops[4] == "no communication"
tables.Table(["from", "to", "collectives"], [list(row) for row in sent])

# %% [markdown]
# All five are arrows in the diagram, and four do what their arrow says. The exception is `Shard(0)` to `Shard(1)`: on a
# CPU, DTensor all-gathers, and each rank keeps its columns. That sends N times as much as an all-to-all.

# %% [markdown]
# ## Three ways to run one step
#
# Next, we run one training step of a TinyGPT block on a mesh of 2 × 2 ranks, with FSDP along "dp" and TP along "tp":
#
# - *ours*: `ZeRO3` of chapter 10, with the layers of chapter 13 (the cell imports our solutions of these labs),
# - *DTensor*: each weight has a placement per axis, and is gathered along "dp" before it is used. We run it twice: with
#   the activations between two pairs of layers fixed to the layout of x, and without that,
# - *XLA*: a JAX program, whose only annotations are the partition specs of the weights and of the batch.
#
# The code is in `shared/spmd/blocks.py`.

# %%
# %%ranks
from types import SimpleNamespace

from shared.spmd import blocks
from solutions import async_collectives, tensor_parallel, zero3

mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
own = SimpleNamespace(
    async_collectives=async_collectives, tensor_parallel=tensor_parallel, zero3=zero3
)
in_ours, up = blocks.our_step(mesh, own)
in_dtensor = blocks.dtensor_step(mesh, up)
without_layouts = blocks.dtensor_step(mesh, up, keeps=False)

# %%
from shared.spmd import blocks

square = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
program, inputs = blocks.jax_program(square)
in_xla = spmd.of_program(program, square)

# %% [markdown]
# **Predict.** All three give the same weights. Do they also send the same along "tp" ("yes" or "no")? And which of them
# sends least along "dp": "ours", "DTensor" or "XLA"?

# %%
my_answer = None

# %%
columns = {"ours": ranks.pull("in_ours")[0], "DTensor": ranks.pull("in_dtensor")[0], "XLA": in_xla}
bytes_along = {
    axis: [spmd.total(c for c in column if c.axes == axis) for column in columns.values()]
    for axis in ("dp", "tp")
}
kb = {axis: ", ".join(f"{each / 1e3:.1f}" for each in along) for axis, along in bytes_along.items()}
print(f"{predicted(my_answer, '{} and {}')}kB along dp: {kb['dp']}; along tp: {kb['tp']}")
assert len(set(bytes_along["tp"])) == 1
assert bytes_along["dp"][1] < bytes_along["dp"][2] < bytes_along["dp"][0]
more = spmd.total(ranks.pull("without_layouts")[0]) / spmd.total(columns["DTensor"])
print(f"without layouts of activations, DTensor sends {more:.2f} times as much")
assert more > 1.3
own_rows = np.split(np.asarray(program(*inputs)[6]), 2)[0]
assert np.allclose(ranks.pull("up")[0].cpu(), own_rows, atol=1e-5)
spmd.side_by_side(columns)

# %% [markdown]
# Along "tp", all three run the same four all-reduces. Along "dp", they differ in three ways:
#
# - **Gathering.** Your `ZeRO3` gathers a unit's flat parameter in forward, and again in backward. The other two gather
#   each weight once, and keep it for backward, like `reshard_after_forward=False`. That saves bytes and costs memory.
# - **Reducing.** You and DTensor reduce-scatter. XLA on a CPU all-reduces, which sends twice as much as a
#   reduce-scatter. With one all-gather, that is 3f. Yours is also 3f: two all-gathers and a reduce-scatter.
# - **Packing.** You pack a unit into one flat tensor. XLA combined all gradients into one all-reduce, as a bucket does.
#   DTensor sends each tensor separately, even the four small gradients of the norms.
#
# Without layouts of activations, DTensor gets the same weights, but sends 39% more, because it decides about one
# operation at a time. XLA's propagation sees the whole program. It needed help with the MLP above, but not here.

# %% [markdown]
# ## Break it: adding to a Partial
#
# If you add something to a Partial before the sum is computed, every rank adds it. In torch, that happened to
# `total_norm + 1e-6` in gradient clipping (PyTorch issue 149768). Next, we add 1 to the terms of case 5 by hand, and
# then let DTensor do it:

# %%
# %%ranks
# product is the result of case 5.
by_hand = DTensor.from_local(product.to_local() + 1, line, [Partial()])
with wire.ledger() as log:
    by_dtensor = product + 1
added = [(each.full_tensor() - product.full_tensor()).mean() for each in (by_hand, by_dtensor)]
print(f"by hand: {added[0]:.3f}, by DTensor: {added[1]:.3f}, which sent: {log.summary()}")
assert abs(added[0] - 4) < 1e-3 and abs(added[1] - 1) < 1e-3 and log.ops == {"all_reduce": 1}

# %% [markdown]
# By hand, we added 4 instead of 1. DTensor of torch 2.13 adds up the terms first, so a harmless `+ 1` costs an
# all-reduce. JAX's explicit axes reject the addition:

# %%
try:
    with jax.set_mesh(typed):
        terms + 1
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    assert "unreduced" in str(error)

# %% [markdown]
# ## The production version
#
# | what | torch | JAX |
# |---|---|---|
# | the rank's shard of a tensor | `DTensor.to_local()` | `array.addressable_shards` |
# | a mesh | `DeviceMesh` | `Mesh` |
# | a layout | a placement per axis of the mesh | an entry of `P` per dimension of the tensor |
# | a constraint | `redistribute` | `with_sharding_constraint`, `reshard` |
# | collectives by hand | `local_map` | `shard_map` |
# | your TP | `parallelize_module` | partition specs |
# | your ZeRO-3 | `fully_shard` | partition specs |
# | the same layout in HLO | – | `P("x", "y")` is `sharding={devices=[4,8]<=[32]}`, `HloSharding::tile` in XLA |
# | who decides, and when | DTensor, for each operation | the compiler: all layouts, then each collective |
#
# In a large JAX program, nobody writes an axis of the mesh into every annotation. MaxText names dimensions, such as
# `embed` or `mlp`, and a table of rules gives each name an axis (`logical_axis_rules`).
#
# XLA has no stages. GSPMD writes a pipeline as one more sharded dimension and a shift along it (§3.3). In JAX, you
# write a pipeline in `shard_map`, with `ppermute`.
#
# What hides the collectives of a compiler? On GPUs, XLA starts them early and waits later. It can also cut an
# all-gather and its product into ring steps, as you did in chapter 13: a *collective matmul* (Wang et al. 2023). The
# rest is in [On a real cluster](../docs/cluster.md).

# %% [markdown]
# ## Optional: seeing placements
#
# Your own model of chapter 13 has no labels, but you can find its placements by running it. `spmd.observe` runs a step,
# lets one rank change its shard of one parameter, and runs it again. `spmd.compare` finds out how the ranks' tensors
# match those of one process: as they are, concatenated, or added up.
#
# The next cells do that to TP with sequence parallelism, and once more without the last all-reduce, which adds up the
# gradients of replicated parameters. The figure shows all gradients. In which rows do the two differ?


# %%
# %%ranks
from shared.data import CharTokens
from solutions.tensor_parallel import parallelize

batch = CharTokens().windows([0, 500], 64)


def observe(is_broken):
    # has_copies=True skips the last all-reduce.
    gpt = parallelize(TinyGPT(GPTConfig(layers=1)).double(), sequence_parallel=True)
    return spmd.observe(
        gpt,
        lambda gpt: gpt(*batch, has_copies=is_broken).backward(),
        "blocks.0.up.weight",
        on_rank=1,
    )


# %%
batch = CharTokens().windows([0, 500], 64)
whole = spmd.observe(TinyGPT(GPTConfig(layers=1)).double(), lambda gpt: gpt(*batch).backward())
seen = {
    name: spmd.compare(ranks.run(lambda is_broken: observe(is_broken), is_broken), whole)
    for name, is_broken in {"TP + SP": False, "without the last all-reduce": True}.items()
}
placements(seen)

# %% [markdown]
# A *strided* shard is not one block: it has a part of the queries, of the keys, and of the values. Replicated gradients
# are equal on all ranks. A partial one is not, although it has the full shape on every rank:

# %%
right, broken = (spmd.still_partial(each) for each in seen.values())
for name in broken:
    print(f"{name} is still Partial on the tp axis")
assert right == [] and len(broken) == 7

# %% [markdown]
# In Megatron-LM, a user found such gradients just before the optimizer step (issue 1446). JAX errs on the other side.
# Inside `shard_map`, the gradient with respect to a replicated array is summed over all devices. If you wanted each
# sample's own gradient, you silently get its sum with the other devices' samples (JAX issue 36886). In the lab, you
# make the mistake on purpose.

# %% [markdown]
# ## Recap
#
# The table is for one step of a block, without its small norms. ψ is the number of parameters that all ranks with the
# same index along "tp" hold together.
#
# | | memory: gathered weights are kept | wire along "dp" | overlap |
# |---|---|---|---|
# | your `ZeRO3` | while a unit computes | 3fψ elements | prefetching |
# | DTensor | from forward until backward | 2fψ | not measured here |
# | XLA on a CPU | from forward until backward | 3fψ | not measured here; on GPUs, collectives start early |
#
# **Terms**
#
# - **GSPMD**: programs are written for one device, with annotations of layouts. The compiler inserts collectives.
# - **global array**: an array with the shape of the whole, of which each device stores a part.
# - **partition spec**: for each dimension of a tensor, the axis of the mesh along which it is split, or none.
# - **contracted**: the dimension over which a product of matrices sums.
# - **propagation**: the compiler carries annotated layouts to all other tensors.
# - **placement**: how a tensor is distributed along one axis of a mesh: replicated, sharded, or partial (a term on each
#   rank).
#
# ## Further reading
#
# - Xu et al., [GSPMD](https://arxiv.org/abs/2105.04663), 2021, §3: annotations, and how layouts propagate.
# - Wang et al., [Overlap communication with dependent computation](https://doi.org/10.1145/3567955.3567959), 2023.
# - [Distributed arrays](https://docs.jax.dev/en/latest/201/sharding.html) in JAX's documentation: auto, explicit and
#   manual axes.
# - [torch.distributed.tensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html) in PyTorch's documentation.
# - [How to Scale Your Model](https://jax-ml.github.io/scaling-book/), the chapter on sharded matrices.

# %% [markdown]
# ## What is still wasted
#
# Layouts make it easy to combine axes, but someone has to choose them. Chapter 18 chooses them for a cluster, with
# pipeline stages as a third axis. In the lab, you build a small partitioner that decides and executes the collectives.

# %%
ranks.stop()
