# ---
# jupyter:
#   course:
#     module: gspmd
# ---

# %% [markdown]
# # 17 · GSPMD
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - describe how a tensor is distributed over a mesh of devices, in JAX and in torch,
# - predict which collective an operation needs, and read from a compiled program which one it got,
# - get FSDP and tensor parallelism from annotations, and say when the compiler needs more of them,
# - explain where your own ZeRO-3 and TP, DTensor and XLA differ, collective by collective.
#
# You need `ZeRO3` (chapter 10), device meshes (chapter 11) and tensor parallelism (chapter 13). f is (N−1)/N on N
# ranks.

# %% [markdown]
# ## Where we are
#
# In chapter 13, you split a GPT by hand. Dozens of lines of that code mention a group of ranks. Every one of them could
# contain a mistake that raises no error. To split the model in another way, you have to write most of them again.
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

from shared import ranks, spmd, tables
from shared.plots import diagrams
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
# Suppose that you annotate only x, and split its letter j. A has no annotation, so the compiler splits it along j, too.
# Annotations spread in this way, forward to results and backward to operands, until nothing changes. This is
# **propagation**. Where two layouts disagree, priorities decide: in GSPMD, layouts first spread through operations such
# as gelu and add, whose operands and results share one layout, and then through products. Nobody counts the bytes of
# the whole program (Xu et al. 2021, §3.5).
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

# %% tags=["claims"] jupyter={"source_hidden": true}
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
# axis "x". `P()` is an annotation, too: this matrix is replicated. Only the layout of the result is left to the
# compiler. What does a device need that it does not have?
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

# %% [markdown]
# A compiled program is text in HLO, XLA's language. `spmd.of_program` finds its collectives, and computes what a device
# sends in a ring:


# %%
def collectives_of(mesh, function, *shapes_and_specs):
    """Compile a function for arrays of these shapes and layouts, without running it."""
    arrays = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*spec)))
        for shape, spec in shapes_and_specs
    ]
    return spmd.of_program(jax.jit(function).lower(*arrays).compile(), mesh)


# %%
specs = [((), (None, "y")), (("x",), ()), ((None, "y"), ("y",)), ((None, "y"), ()), ((), ("y",))]
rows = []
for case, (of_x, of_a) in enumerate(specs, 1):
    each = collectives_of(mesh, jnp.matmul, ((256, 2048), of_x), ((2048, 4096), of_a))
    compiled = ", ".join(map(str, each)) or "none"
    rows.append([str(case), my_collectives[case] or "", compiled, f"{spmd.total(each) / 1e6:.1f}"])
tables.Table(["case", "predicted", "compiled", "MB sent"], rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
ops = [row[2].split(" ")[0] for row in rows]
assert ops == ["none", "none", "all_reduce", "all_gather", "all_gather"]
assert [row[3] for row in rows] == ["0.0", "0.0", "7.3", "1.8", "29.4"]

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
# mention devices. `jax.grad(loss)` is a function that returns the gradient of the loss with respect to w:


# %%
def loss(w, x):
    return jnp.square(x @ w).mean()


def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


line = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
w_and_x = ((512, 512), ("d",)), ((1024, 512), ("d",))
columns = {"annotated": collectives_of(line, step, *w_and_x)}

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
columns["shard_map"] = collectives_of(line, manual, *w_and_x)
multiple = spmd.total(columns["annotated"]) / (7 / 8 * 4 * 512 * 512)
print(f"{predicted(my_multiple)}compiled {multiple:g}")
spmd.side_by_side(columns)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [each.op for each in columns["annotated"]] == ["all_gather", "all_reduce"]
assert [each.op for each in columns["shard_map"]] == ["all_gather", "reduce_scatter"]
rng = np.random.default_rng(0)
w, x = (rng.normal(size=shape).astype(np.float32) for shape, _ in w_and_x)
on_devices = [jax.device_put(each, NamedSharding(line, P("d"))) for each in (w, x)]
assert "dynamic-slice(" in jax.jit(step).lower(*on_devices).compile().as_text()
for way in (step, manual):
    assert np.allclose(step(w, x), jax.jit(way)(*on_devices), atol=1e-5)

# %% [markdown]
# On a CPU, XLA all-reduces the gradient, and then each device cuts out its own shard. The weights are right, but the
# factor is 3 instead of 2. For GPUs, XLA has a pass that turns an all-reduce followed by a slice into a reduce-scatter
# (`ReduceScatterCreator`; XLA pull request 31030). So read what *your* compiler has inserted.
#
# The second column is from `shard_map`: there, a function runs on each device's own shards, and you write the
# collectives yourself. The gradient of an all-gather is a reduce-scatter, as in chapter 13. Both steps give the same
# weights as one device.

# %% [markdown]
# ## When the compiler needs help
#
# With one weight, annotations gave FSDP, except for the reduce-scatter. Are they enough for two layers in a row? We
# compile the gradients of an MLP with respect to A, B and x in three ways: with the annotations of FSDP, with one more
# for the inner activations, and with those of TP. FSDP should only move weights. What else moves in the first column?


# %%
def mlp(a, b, x, keep=lambda inner: inner):
    return jnp.square(keep(jax.nn.gelu(x @ a)) @ b).mean()


def constrained(a, b, x):
    # The additional annotation: the inner activations are split like x.
    by_sample = NamedSharding(line, P("d"))
    return mlp(a, b, x, keep=lambda inner: jax.lax.with_sharding_constraint(inner, by_sample))


# %%
sizes = (512, 2048), (2048, 512), (1024, 512)  # of a, b and x
fsdp, tp = [("d",)] * 3, [(None, "d"), ("d",), ()]
columns = {}
for name, function, specs in (
    ("FSDP", mlp, fsdp),
    ("FSDP, constrained", constrained, fsdp),
    ("TP", mlp, tp),
):
    gradients = jax.grad(function, argnums=(0, 1, 2))
    columns[name] = collectives_of(line, gradients, *zip(sizes, specs, strict=True))
mega = 1024**2
spmd.side_by_side(columns, {2 * mega: "x or output", 4 * mega: "weight", 8 * mega: "inner"})

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [each.op for each in columns["TP"]] == ["all_reduce"] * 2
assert len(columns["FSDP"]) > 2 * len(columns["FSDP, constrained"]) == 6

# %% [markdown]
# TP gets the same collectives as a pair of layers in chapter 13: one all-reduce in forward, and one in backward.
#
# FSDP should send 14.7 MB here: an all-gather and a reduce-scatter of 8.4 MB of weights. The annotated program sends
# twice as much. Why? Two layouts meet at the inner activations. The layout of x, propagated forward, splits them by
# rows; that of B, propagated backward, splits them by columns. Some operations keep the first layout and others the
# second, so activations have to move between the two. The three all-gathers of 2.1 and 8.4 MB move them, and so do the
# four all-to-alls, each of 8.4 MB, of which the table shows one device's eighth. Only the two all-gathers of 4.2 MB
# fetch weights.
#
# One more annotation ends the disagreement: two all-gathers remain, and one all-reduce of both gradients. They send
# 22.0 MB. The excess that is left comes from the CPU's all-reduce in place of a reduce-scatter.

# %% [markdown]
# ## Experts along a sharded axis
#
# In chapter 16, you wrote the two all-to-alls of a mixture of experts. GShard, GSPMD's predecessor, leaves them to the
# compiler (Lepikhin et al. 2020, §3). Each device has a group g of s tokens, and an expert e with room for c rows of
# each group. `mask[g, s, e, c]` is 1 where token s is row c of expert e, and `weights` has the router's weight there.
# The widths are m outside of an expert, and h inside. All arrays are split along their first dimension. We compile the
# layer for few tokens and for many. Do both get your two all-to-alls?


# %%
def experts(mask, weights, x, up, down):
    rows = jnp.einsum("gsec,gsm->egcm", mask, x)  # dispatch
    inner = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, up))
    outputs = jnp.einsum("egch,ehm->egcm", inner, down)
    return jnp.einsum("gsec,egcm->gsm", weights, outputs)  # combine


columns, (g, e, m, h) = {}, (8, 8, 512, 1024)
for s, c in ((128, 32), (1024, 256)):
    sizes = (g, s, e, c), (g, s, e, c), (g, s, m), (e, m, h), (e, h, m)
    columns[f"s = {s:,}"] = collectives_of(line, experts, *((size, ("d",)) for size in sizes))
spmd.side_by_side(columns)

# %% tags=["claims"] jupyter={"source_hidden": true}
few, many = columns.values()
assert [each.op for each in few] == ["all_to_all"] * 2
assert [each.op for each in many] == ["all_gather"] * 2


def constrained_experts(mask, weights, x, up, down):
    rows = jnp.einsum("gsec,gsm->egcm", mask, x)
    rows = jax.lax.with_sharding_constraint(rows, NamedSharding(line, P("d")))
    inner = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, up))
    return jnp.einsum("gsec,egcm->gsm", weights, jnp.einsum("egch,ehm->egcm", inner, down))


constrained_many = collectives_of(line, constrained_experts, *((size, ("d",)) for size in sizes))
assert [each.op for each in constrained_many] == ["all_to_all"] * 2
assert constrained_many[0].sent_bytes == 7 / 8 * 4 * e * 256 * m
assert spmd.total(many) == 4 * spmd.total(constrained_many)

# %% [markdown]
# With few tokens, you get your dispatch and your combine: the rows are split by g before the first all-to-all, and by e
# after it. With more tokens, XLA leaves them in place, and gathers both matrices of all experts.
#
# The annotations are the same, so only sizes can make the difference. XLA moves the smaller operand of the product, as
# if it compared whole operands, one product at a time. One matrix of all experts has 16.8 MB. With few tokens, the rows
# of all groups have only 4.2 MB (the table again shows an eighth), so the rows move. With more tokens, they have 33.6
# MB, so the matrix moves. But what counts is what a device sends: 3.7 MB for an all-to-all of the large rows, 14.7 for
# an all-gather of the matrix. If a constraint says that the rows belong to the experts, as in GShard, XLA sends a
# quarter as much.

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
    try:
        x @ a
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    terms = jnp.einsum("ij,jk->ik", x, a, out_sharding=P(unreduced={"y"}))
print(f"not added up: {jax.typeof(terms)}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert "U:y" in str(jax.typeof(terms))

# %% [markdown]
# The plain product fails: JAX does not guess what should happen to the terms. `out_sharding=P()` would ask for the sum.
# We keep the terms: `{U:y}` says that this array is *unreduced* along "y".

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

from shared import wire

line, R = init_device_mesh(device.type, (4,), mesh_dim_names=("d",)), Replicate()
torch.manual_seed(0)
x, a = torch.randn(256, 512, device=device), torch.randn(512, 256, device=device)
cases = [(R, Shard(1)), (Shard(0), R), (Shard(1), Shard(0)), (Shard(1), R), (R, Shard(0))]
products = []
for of_x, of_a in cases:
    own_x, own_a = distribute_tensor(x, line, [of_x]), distribute_tensor(a, line, [of_a])
    with wire.ledger() as log:
        product = own_x @ own_a
    products.append([repr(product.placements[0]), log.summary()])

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
for of_x, of_a in cases:
    own_x, own_a = distribute_tensor(x, line, [of_x]), distribute_tensor(a, line, [of_a])
    assert torch.allclose((own_x @ own_a).full_tensor(), x @ a, atol=1e-3)

# %%
products = ranks.pull("products")[0]
count = sum(placement == "Partial(sum)" for placement, _ in products)
print(f"{predicted(my_count)}measured {count}")
rows = [[str(case), *each] for case, each in enumerate(products, 1)]
tables.Table(["case", "DTensor's result", "its collectives"], rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert count == 3 and {summary for _, summary in products} == {"no communication"}

# %% [markdown]
# DTensor sends nothing in any case. In cases 4 and 5, each rank uses its part of the replicated tensor, so the result
# is partial. An all-reduce has to follow when an operation needs the sum. For the JAX program's sizes, that all-reduce
# costs 7.3 MB. XLA's all-gather costs 29.4 MB in case 5, so DTensor wins, but 1.8 MB in case 4, so XLA wins.

# %% [markdown]
# ## Three ways to run one step
#
# Can a compiler keep up with your own code? We train a TinyGPT block for one step on a mesh of 2 × 2 ranks, with FSDP
# along "dp" and TP along "tp":
#
# - *ours*: `ZeRO3` of chapter 10, with the layers of chapter 13 (the cell imports our solutions of these labs),
# - *DTensor*: each weight has a placement per axis, and is gathered along "dp" before it is used. The activations
#   between two pairs of layers are fixed to the layout of x,
# - *XLA*: a JAX program, whose only annotations are the partition specs of the weights and of the batch.
#
# The code is in `shared/spmd/blocks.py`.

# %%
# %%ranks
from shared.spmd import blocks
from solutions import async_collectives, tensor_parallel, zero3

mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
in_ours, up = blocks.our_step(mesh, async_collectives, tensor_parallel, zero3)
in_dtensor = blocks.dtensor_step(mesh, up)

# %%
from shared.spmd import blocks

square = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
program, inputs = blocks.jax_program(square)

# %% [markdown]
# **Predict.** All three give the same weights. Do they also send the same along "tp" ("yes" or "no")? And which of them
# sends least along "dp": "ours", "DTensor" or "XLA"?

# %%
my_answer = None

# %%
columns = {"ours": ranks.pull("in_ours")[0], "DTensor": ranks.pull("in_dtensor")[0]}
columns["XLA"] = spmd.of_program(program, square)
print(predicted(my_answer, "{} and {}", "\n"), end="")
kb = {}
for axis in ("dp", "tp"):
    along = [[each for each in column if each.axes == axis] for column in columns.values()]
    kb[axis] = [spmd.total(each) / 1e3 for each in along]
    print(f"kB along {axis}:", ", ".join(f"{each:.1f}" for each in kb[axis]))
spmd.side_by_side(columns)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert len(set(kb["tp"])) == 1 and kb["dp"][1] < kb["dp"][2] < kb["dp"][0]
own_rows = np.split(np.asarray(program(*inputs)[6]), 2)[0]
assert np.allclose(ranks.pull("up")[0].cpu(), own_rows, atol=1e-5)

# %% [markdown]
# Along "tp", all three run the same four all-reduces. Along "dp", they differ in three ways:
#
# - **Gathering.** Your `ZeRO3` gathers a unit's flat parameter in forward, and again in backward. The other two gather
#   each weight once, and keep it for backward, like `reshard_after_forward=False`. That saves bytes and costs memory.
# - **Reducing.** You and DTensor reduce-scatter. XLA on a CPU all-reduces, which sends twice as much as a
#   reduce-scatter. With one all-gather, that is 3f. Yours is also 3f: two all-gathers and a reduce-scatter. (Only
#   yours also gathers the small norms, hence 149.0 kB and not 148.5.)
# - **Packing.** You pack a unit into one flat tensor. XLA combined all gradients into one all-reduce, as a bucket does.
#   DTensor sends each tensor separately, even the four small gradients of the norms.
#
# DTensor decides about one operation at a time, so we fixed the layout of its activations. XLA's propagation sees the
# whole program. It needed help with the MLP above, but not here.

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

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert abs(added[0] - 4) < 1e-3 and abs(added[1] - 1) < 1e-3 and log.ops == {"all_reduce": 1}

# %% [markdown]
# By hand, we added 4 instead of 1. DTensor of torch 2.13 adds up the terms first, so a harmless `+ 1` costs an
# all-reduce. JAX's explicit axes reject the addition. Without such labels, nothing stops you: in Megatron-LM, a user
# found that the tp ranks had different gradients of one norm just before the optimizer step (issue 1446). In the lab,
# you make the mistake on purpose.

# %% tags=["claims"] jupyter={"source_hidden": true}
try:
    with jax.set_mesh(typed):
        terms + 1
except Exception as error:
    rejected = str(error)
assert "unreduced" in rejected

# %% [markdown]
# ## The production version
#
# | what | torch | JAX |
# |---|---|---|
# | a layout | a placement per axis of the mesh | an entry of `P` per dimension of the tensor |
# | a constraint | `redistribute` | `with_sharding_constraint`, `reshard` |
# | collectives by hand | `local_map` | `shard_map` |
# | your TP | `parallelize_module` | partition specs |
# | your ZeRO-3 | `fully_shard` | partition specs |
# | the same layout in HLO | – | `P("x", "y")` is `sharding={devices=[4,8]<=[32]}`, `HloSharding::Tile` in XLA |
# | who decides, and when | DTensor, for each operation | the compiler: all layouts, then each collective |
#
# In a large JAX program, nobody writes an axis of the mesh into every annotation. MaxText names dimensions, such as
# `embed` or `mlp`, and a table of rules gives each name an axis (`logical_axis_rules`).
#
# XLA has no stages. GSPMD writes a pipeline as one more sharded dimension and a shift along it (Xu et al. 2021, §3.3).
# In JAX, you write a pipeline in `shard_map`, with `ppermute`.
#
# What hides the collectives of a compiler? On GPUs, XLA starts them early and waits later. It can also cut an
# all-gather and its product into ring steps, as you did in chapter 13: a *collective matmul* (Wang et al. 2023). The
# rest is in [On a real cluster](../docs/cluster.md).

# %% [markdown]
# ## Recap
#
# Three rules worth keeping:
#
# - If both operands are split along the contracted dimension, a device has one term of the result, and somebody must
#   add. If one is split and the other replicated, XLA gathers the split one, and DTensor returns a Partial.
# - Annotations say where tensors are, not what is sent. Read the collectives of the compiled program.
# - If the program sends too much, look for a tensor where two layouts meet, and constrain it.
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
