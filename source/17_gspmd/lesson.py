# ---
# jupyter:
#   course:
#     module: gspmd
# ---

# %% [markdown]
# # 17 · GSPMD
#
# **50–85 minutes.** After this lesson, you will be able to:
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

# %% tags=["nbval-ignore-output"]
import jax
import numpy as np
import torch
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared import ranks, spmd, tables, widgets
from shared.data import CharTokens
from shared.models import Block, GPTConfig, TinyGPT
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
# We use JAX, a library for computing with arrays, and its compiler, XLA. GSPMD is the paper and the idea: since JAX
# 0.7, a newer part, Shardy, chooses the layouts by default, and XLA's partitioner inserts the collectives.
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
instructions = programs[3].as_text().splitlines()
print(*(each.split(", metadata")[0] for each in instructions if "all-reduce(" in each))

# %% [markdown]
# This line is an instruction of case 3, in HLO, XLA's language. After its name comes the shape of the result.
# `{'axis_1'}` names the axis along which the terms are added up. It has length 8, so it is our "y". `spmd.of_program`
# reads such lines, and computes what a device sends in a ring:

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

# %% [markdown]
# Does XLA insert an all-gather whenever a sharded matrix meets a replicated one, as is often claimed? No:
#
# - In cases 1 and 2, a device has all it needs for its own columns or rows of the result. Case 1 is column parallelism,
#   and case 2 is data parallelism.
# - In case 3, both matrices are split along the **contracted** dimension, over which the product sums. Each device
#   computes a term of the result, and an all-reduce adds up the terms. This is row parallelism.
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
# the compiled program send? The step needs 2.

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
spmd.side_by_side(columns)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [each.op for each in columns["TP"]] == ["all_reduce"] * 2
assert len(columns["FSDP"]) > 2 * len(columns["FSDP, constrained"]) == 6

# %% [markdown]
# TP gets the same collectives as a pair of layers in chapter 13: one all-reduce in forward, and one in backward. But
# with FSDP, the compiler has to decide whether the inner activations are split by rows, like x, or by columns, to match
# the rows of B. It did both. Two of its all-gathers (4.2 MB each) fetch weights, as FSDP should. The other all-gathers,
# and every all-to-all, move x, activations or their gradients between the two layouts. With one more annotation, there
# are only two all-gathers, and an all-reduce of both gradients together.

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
# as much. The constraint says that the rows belong to the experts, as GShard's annotation does.

# %% [markdown]
# ## Auto, explicit and manual axes
#
# Each axis of a mesh has one of three types:
#
# | type | who decides the layouts | who inserts the collectives |
# |---|---|---|
# | auto | the compiler, from your annotations | the compiler |
# | explicit | you: each array's type states its layout, and unclear ones raise an error | the compiler |
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
# Along an axis, an array is split, replicated or unreduced. torch has the same three possibilities, called
# **placements**. A `DTensor` is a shard with its mesh, and a placement for each axis:

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
from functools import partial

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from shared import spmd, wire
from shared.models import Block, GPTConfig, TinyGPT

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
# All but one are arrows in the diagram. From `Shard(0)` to `Shard(1)`, an all-to-all would do, but on a CPU, DTensor
# all-gathers instead.

# %% [markdown]
# ## Three ways to run one step
#
# Next, we run one training step of a TinyGPT block on a mesh of 2 × 2 ranks, with FSDP along "dp" and TP along "tp".
# The first version uses your own `ZeRO3`, and your layers of chapter 13. On gloo, your all-gathers and reduce-scatters
# send shards directly from rank to rank. We turn that off, so that the ledger shows collectives.


# %%
# %%ranks
from solutions import async_collectives
from solutions.tensor_parallel import ColumnParallelLinear, ParallelAttention, RowParallelLinear
from solutions.zero3 import ZeRO3

# %%
# %%ranks
# False: use the backend's own collectives.
async_collectives.exchanges_directly = lambda *_: False
mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
dp, tp = groups.values()

torch.manual_seed(0)
block, x = Block(GPTConfig()), torch.randn(8, 64, 64)
weights = [parameter.detach().clone() for parameter in block.parameters()]
weights[2] = weights[2].unflatten(0, (3, 4, 16))  # queries, keys and values, by head
block.attention = ParallelAttention.from_attention(block.attention, tp)
block.up = ColumnParallelLinear.from_linear(block.up, tp)
block.down = RowParallelLinear.from_linear(block.down, tp)
ours = ZeRO3(nn.Sequential(block.to(device)), group=dp)

# %%
# %%ranks
with wire.ledger() as log:
    ours(x.chunk(2)[dist.get_rank(dp)].to(device)).square().mean().backward()
    ours.finish_gradient_sync()
torch.optim.SGD(ours.parameters(), lr=1.0).step()
in_ours = spmd.of_ledger(log, groups)
up = ours.full_state_dict()["0.up.weight"]

# %% [markdown]
# The second version uses DTensors. Each weight has a placement per axis. `unshard` gathers the weights along "dp"
# before they are used. `keep` gives the activations outside of a pair of layers the layout of x. For fused attention on
# a CPU, DTensor has no rule, so we use `local_map`, torch's `shard_map`. We run the step with and without `keep`.


# %%
# %%ranks
from torch.distributed.tensor.experimental import local_map

by_head = [Shard(0), Shard(1)]  # (B, H, T, D/H): samples along "dp", heads along "tp"
attend = partial(scaled_dot_product_attention, is_causal=True)
attend = local_map(attend, out_placements=(by_head,), in_placements=(by_head,) * 3)


def unshard(weight):
    return weight.redistribute(placements=[R, weight.placements[1]])


def keep(y):
    return y.redistribute(placements=[Shard(0), R])


def block_of(weights, x, keep):
    gain_1, bias_1, query_key_value, project, gain_2, bias_2, up, down = map(unshard, weights)
    y = keep(layer_norm(x, (64,), gain_1, bias_1))
    split = linear(y, query_key_value.flatten(0, 2)).unflatten(-1, (3, 4, 16))
    mixed = attend(*split.permute(2, 0, 3, 1, 4))
    x = x + keep(linear(mixed.transpose(1, 2).flatten(2), project))
    y = keep(layer_norm(x, (64,), gain_2, bias_2))
    return x + keep(linear(gelu(linear(y, up)), down))


# %%
# %%ranks
whole, layout = [R, R], [Shard(0), Shard(1)]
places = [whole, whole, [Shard(3), Shard(1)], layout, whole, whole, [Shard(1), Shard(0)], layout]
samples = distribute_tensor(x.to(device), mesh, [Shard(0), R])


def dtensor_step(keep):
    copies = [each.to(device, copy=True) for each in weights]
    pairs = zip(copies, places, strict=True)
    own = [nn.Parameter(distribute_tensor(each, mesh, place)) for each, place in pairs]
    with wire.ledger() as log:
        block_of(own, samples, keep).square().mean().backward()
        # No gradient stays Partial: each gets the placements of its weight.
        for each in own:
            each.grad = each.grad.redistribute(placements=each.placements)
    torch.optim.SGD(own, lr=1.0).step()
    own_rows = own[6].full_tensor().chunk(2)[dist.get_rank(tp)]
    assert torch.allclose(up, own_rows, atol=1e-5)
    return spmd.of_ledger(log, groups)


in_dtensor, without_keep = dtensor_step(keep), dtensor_step(lambda y: y)

# %% [markdown]
# The third version is a JAX program. Its only annotations are the partition specs of the weights and of the batch:


# %%
def jax_block(weights, x):
    def norm(x, gain, bias):
        return jax.nn.standardize(x, epsilon=1e-5) * gain + bias

    gain_1, bias_1, query_key_value, project, gain_2, bias_2, up, down = weights
    # c: query, key or value; h: the head; k: the element in a head
    split = jnp.einsum("btd,chkd->cbthk", norm(x, gain_1, bias_1), query_key_value)
    mixed = jax.nn.dot_product_attention(*split, is_causal=True)
    x = x + mixed.reshape(x.shape) @ project.T
    inner = jax.nn.gelu(norm(x, gain_2, bias_2) @ up.T, approximate=False)
    return x + inner @ down.T


def jax_step(weights, x):
    gradients = jax.grad(lambda weights: jnp.square(jax_block(weights, x)).mean())(weights)
    return [weight - gradient for weight, gradient in zip(weights, gradients, strict=True)]


# %%
square = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
specs = [P(), P(), P(None, "tp", None, "dp"), P("dp", "tp")]
specs += [P(), P(), P("tp", "dp"), P("dp", "tp")]
torch.manual_seed(0)
tensors, samples = list(Block(GPTConfig()).parameters()), torch.randn(8, 64, 64)
arrays = [each.detach().numpy() for each in tensors]
arrays[2] = arrays[2].reshape(3, 4, 16, 64)
shardings = [NamedSharding(square, spec) for spec in specs]
arrays = [jax.device_put(*each) for each in zip(arrays, shardings, strict=True)]
samples = jax.device_put(samples.numpy(), NamedSharding(square, P("dp")))
program = compiled(jax_step, arrays, samples)
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
print(
    f"{predicted(my_answer, '{} and {}')}sent along dp: {bytes_along['dp']}, along tp: {bytes_along['tp']}"
)
assert len(set(bytes_along["tp"])) == 1
assert bytes_along["dp"][1] < bytes_along["dp"][2] < bytes_along["dp"][0]
more = spmd.total(ranks.pull("without_keep")[0]) / spmd.total(columns["DTensor"])
print(f"without keep, DTensor sends {more:.2f} times as much")
assert more > 1.3
own_rows = np.split(np.asarray(program(arrays, samples)[6]), 2)[0]
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
# Without `keep`, DTensor gets the same weights, but sends 39% more, because it decides about one operation at a time.
# XLA sees the whole program, and needed no help here.

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
# ## Break it: a gradient that is still Partial
#
# With sequence parallelism, each rank's gradient of a norm is a term of a sum. In Megatron-LM, a user found that these
# gradients differed between ranks just before the optimizer step (issue 1446). With DTensor, a missing label is enough:

# %%
# %%ranks
own_tokens = torch.randn(4, 64, device=device) + rank
gradients = {}
for name, label in {"not labeled": None, "labeled": [Partial()]}.items():
    gain = nn.Parameter(distribute_tensor(torch.ones(64, device=device), line, [R]))
    (own_tokens * gain.to_local(grad_placements=label)).square().mean().backward()
    on_ranks = [None] * world_size
    dist.all_gather_object(on_ranks, gain.grad.redistribute(placements=[R]).to_local()[0].item())
    gradients[name] = len(set(on_ranks))
print(f"different gradients on {world_size} ranks: {gradients}")
assert gradients == {"not labeled": 4, "labeled": 1}

# %% [markdown]
# Without a label, DTensor assumes that the gradient is placed like the parameter: replicated. Nothing is sent, and the
# ranks drift apart. JAX errs on the other side. Inside `shard_map`, the gradient with respect to a replicated array is
# summed over all devices. If you wanted each sample's own gradient, you silently get the sum (JAX issue 36886).

# %% [markdown]
# ## Seeing placements
#
# Your own model of chapter 13 has no labels, but you can find its placements by running it. `spmd.observe` runs a step,
# lets one rank change its shard of one parameter, and runs it again. `spmd.compare` finds out how the ranks' tensors
# match those of one process: as they are, concatenated, or added up.
#
# The next cells do that to TP with sequence parallelism, and once more without the last all-reduce, which adds up the
# gradients of replicated parameters. In which rows do the two differ? In JupyterLab, you can choose another parameter
# or rank, and both models run again.


# %%
# %%ranks
from shared.data import CharTokens
from solutions.tensor_parallel import parallelize

batch = CharTokens().windows([0, 500], 64)


def observe(parameter, on_rank, is_broken):
    # has_copies=True skips the last all-reduce.
    gpt = parallelize(TinyGPT(GPTConfig(layers=1)).double(), sequence_parallel=True)
    return spmd.observe(
        gpt, lambda gpt: gpt(*batch, has_copies=is_broken).backward(), parameter, on_rank
    )


# %%
batch = CharTokens().windows([0, 500], 64)
whole = spmd.observe(TinyGPT(GPTConfig(layers=1)).double(), lambda gpt: gpt(*batch).backward())
seen = {}


def draw(parameter, rank):
    for name, is_broken in {"TP + SP": False, "without the last all-reduce": True}.items():
        on_ranks = ranks.run(lambda *which: observe(*which), parameter, rank, is_broken)
        seen[name] = spmd.compare(on_ranks, whole)
    return placements(seen)


parameters = [f"blocks.0.{layer}.weight" for layer in ("up", "down", "attention.project")]
widgets.placement_chooser(draw, parameters, 4, "blocks.0.up.weight", rank=1)

# %% [markdown]
# Before `up`, nothing changes. The output of `up` changes on rank 1 only. After the next collective, the outputs of all
# ranks change. A *strided* shard is not one block: it has a part of the queries, of the keys, and of the values. A
# replicated gradient changes equally on all ranks. A partial one does not, although it has the full shape on every
# rank:

# %%
right, broken = (spmd.still_partial(each) for each in seen.values())
for name in broken:
    print(f"{name} is still Partial on the tp axis")
assert right == [] and len(broken) == 7

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
# | who decides, and when | DTensor, for each operation | the compiler, for the whole program |

# %% [markdown]
# ## On a cluster
#
# | question | here | with NCCL and many hosts |
# |---|---|---|
# | What does the compiler insert? | what XLA does for a CPU | on GPUs also reduce-scatters: read the program |
# | Which axis is within a host? | all | the last axis of the mesh: give it to TP |
# | What hides XLA's collectives? | nothing | XLA starts them early, and waits later (`all-gather-start`, `-done`) |
# | What turns `Shard(0)` into `Shard(1)`? | all-gather | all-to-all |

# %% [markdown]
# ## Recap
#
# The table is for one step of a block, without its small norms. ψ is the number of parameters that all ranks with the
# same index along "tp" hold together.
#
# | | memory: gathered weights are kept | wire along "dp" | overlap |
# |---|---|---|---|
# | your `ZeRO3` | while a unit computes | 3fψ elements | prefetching |
# | DTensor | until backward | 2fψ | none |
# | XLA on a CPU | until backward | 3fψ | none |
#
# **Terms**
#
# - **GSPMD**: programs are written for one device, with annotations of layouts. The compiler inserts collectives.
# - **global array**: an array with the shape of the whole, of which each device stores a part.
# - **partition spec**: for each dimension of a tensor, the axis of the mesh along which it is split, or none.
# - **contracted**: the dimension over which a product of matrices sums.
# - **placement**: how a tensor is distributed along one axis of a mesh: replicated, sharded, or partial (a term on each
#   rank).
#
# ## Further reading
#
# - Xu et al., [GSPMD](https://arxiv.org/abs/2105.04663), 2021, §3: annotations, and how layouts propagate.
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
